"""Codecs: what bytes stand for a gradient on the wire."""

from hvdkit.compression.codec import CODECS, Codec, Fp16Codec, NoneCodec

__all__ = ["CODECS", "Codec", "Fp16Codec", "NoneCodec"]
