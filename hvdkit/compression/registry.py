"""The codecs by name, and by the summary that ranks send."""

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
    """The built-in lossy codecs, by the names that users write."""

    int8 = Int8
    int4 = Int4
    onebit = OneBit
    topk = TopK
    threshold = Threshold
    randomk = RandomK
    dgc = DGC
    powersgd = PowerSGD


def _classes() -> dict[str, type[LossyCodec]]:
    """Return all lossy codecs of this process by name; a name of a built-in codec is that codec."""
    classes: list[type[LossyCodec]] = [codec for codec in vars(Codecs).values() if isinstance(codec, type)]
    below = LossyCodec.__subclasses__()
    while below:
        classes.append(below.pop())
        below += classes[-1].__subclasses__()
    return {codec.name: codec for codec in reversed(classes) if hasattr(codec, "name")}


def codec_with_summary(summary: str) -> Codec:
    """Return the codec with this ``Codec.summary``. Raises ValueError where this process has no such codec."""
    if summary in CASTS:
        return CASTS[summary]
    name, _, fields = summary.removesuffix(")").partition("(")
    codec_class = _classes().get(name)
    if codec_class is None:
        raise ValueError(
            f"there is no codec '{name}' in this process\nHINT: import the module that defines it before hvd.join()."
        )
    call = ast.parse(f"codec({fields})", mode="eval").body
    assert isinstance(call, ast.Call)
    codec = codec_class(**{str(field.arg): ast.literal_eval(field.value) for field in call.keywords})
    if codec.summary != summary:
        raise ValueError(f"the codec '{name}' has other parameters here: {codec.summary}, where others have {summary}")
    return codec
