"""The codecs there are, by name; and from what ranks tell of one back to it."""

from __future__ import annotations

import ast

from hvdkit.compression.casts import CASTS
from hvdkit.compression.codec import Codec
from hvdkit.compression.dgc import DGC
from hvdkit.compression.lossy import LossyCodec
from hvdkit.compression.low_rank import PowerSGD
from hvdkit.compression.quantised import Int4, Int8, OneBit
from hvdkit.compression.random_k import RandomK
from hvdkit.compression.sparse import Threshold, TopK


class Codecs:
    """The built-in lossy codecs, under the names that users know them by."""

    int8 = Int8
    int4 = Int4
    onebit = OneBit
    topk = TopK
    threshold = Threshold
    randomk = RandomK
    dgc = DGC
    powersgd = PowerSGD


def _classes() -> dict[str, type[LossyCodec]]:
    """All there are in this process, of which a built-in one has its name first."""
    found: list[type[LossyCodec]] = [one for one in vars(Codecs).values() if isinstance(one, type)]
    below = LossyCodec.__subclasses__()
    while below:
        found.append(below.pop())
        below += found[-1].__subclasses__()
    return {one.name: one for one in reversed(found) if hasattr(one, "name")}


def codec_with_summary(summary: str) -> Codec:
    """The codec of which ``Codec.summary`` is this. Raises ValueError where this process has no such codec."""
    if summary in CASTS:
        return CASTS[summary]
    name, _, fields = summary.removesuffix(")").partition("(")
    known = _classes().get(name)
    if known is None:
        raise ValueError(
            f"there is no codec '{name}' in this process\nHINT: import the module that defines it before hvd.join()."
        )
    call = ast.parse(f"codec({fields})", mode="eval").body
    assert isinstance(call, ast.Call)
    codec = known(**{str(field.arg): ast.literal_eval(field.value) for field in call.keywords})
    if codec.summary != summary:
        raise ValueError(f"the codec '{name}' has other parameters here: {codec.summary}, where others have {summary}")
    return codec
