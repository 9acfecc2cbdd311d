"""From what ranks tell of a codec back to the codec, for a rank that has joined and knows only what others ask for."""

from __future__ import annotations

import ast

from hvdkit.compression.casts import CASTS
from hvdkit.compression.codec import Codec
from hvdkit.compression.dgc import DGC
from hvdkit.compression.payload import CustomCodec, PayloadCodec
from hvdkit.compression.quantised import Int4, Int8, OneBit
from hvdkit.compression.random_k import RandomK
from hvdkit.compression.sparse import Threshold, TopK


def _classes() -> dict[str, type[PayloadCodec]]:
    known: list[type[PayloadCodec]] = [Int8, Int4, OneBit, TopK, Threshold, RandomK, DGC]
    custom: list[type[PayloadCodec]] = list(CustomCodec.__subclasses__())
    while custom:
        known.append(custom.pop())
        custom += known[-1].__subclasses__()
    return {one.name: one for one in reversed(known) if hasattr(one, "name")}


def codec_told(told: str) -> Codec:
    """The codec of which ``Codec.told`` is this. Raises ValueError where this process has no such codec."""
    if told in CASTS:
        return CASTS[told]
    name, _, fields = told.removesuffix(")").partition("(")
    known = _classes().get(name)
    if known is None:
        raise ValueError(
            f"there is no codec '{name}' in this process\nHINT: import the module that defines it before hvd.join()."
        )
    call = ast.parse(f"codec({fields})", mode="eval").body
    assert isinstance(call, ast.Call)
    codec = known(**{str(field.arg): ast.literal_eval(field.value) for field in call.keywords})
    if codec.told != told:
        raise ValueError(f"the codec '{name}' has other parameters here: {codec.told}, where others have {told}")
    return codec
