"""Codecs: what bytes stand for a gradient on the wire, and what is kept of what they do not carry."""

from hvdkit.compression.casts import CASTS, Cast
from hvdkit.compression.codec import Codec
from hvdkit.compression.dgc import DGC
from hvdkit.compression.lossy import LinearCodec, LossyCodec
from hvdkit.compression.low_rank import PowerSGD
from hvdkit.compression.memory import Memory, Tally
from hvdkit.compression.payload import CustomCodec, PayloadCodec
from hvdkit.compression.quantised import Int4, Int8, OneBit
from hvdkit.compression.random_k import RandomK
from hvdkit.compression.registry import Codecs, codec_told
from hvdkit.compression.sparse import Threshold, TopK

__all__ = [
    "CASTS",
    "DGC",
    "Cast",
    "Codec",
    "Codecs",
    "CustomCodec",
    "Int4",
    "Int8",
    "LinearCodec",
    "LossyCodec",
    "Memory",
    "OneBit",
    "PayloadCodec",
    "PowerSGD",
    "RandomK",
    "Tally",
    "Threshold",
    "TopK",
    "codec_told",
]
