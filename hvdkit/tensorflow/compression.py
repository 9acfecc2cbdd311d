"""The values of ``compression=``: hvdkit's codecs, and Horovod's classes, which compress before an operation."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvdkit.api.gradients.compression import Compressions, Compressor


class FP16Compressor(Compressor):
    """A compressor to float16: half of float32's bytes, for range and precision. Complex numbers are pairs of them."""

    dtype = tf.float16
    cast = "fp16"

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        """Return a floating point or complex tensor in 16 bits, or another tensor as it is; and the tensor's dtype."""
        if tensor.dtype.is_complex:
            pairs = tf.stack([tf.math.real(tensor), tf.math.imag(tensor)], axis=-1)
            return tf.cast(pairs, cls.dtype), tensor.dtype
        return (tf.cast(tensor, cls.dtype) if tensor.dtype.is_floating else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return the tensor in its former dtype."""
        if ctx.is_complex:
            pairs = tf.cast(tensor, ctx.real_dtype)
            return tf.complex(pairs[..., 0], pairs[..., 1])
        return tf.cast(tensor, ctx) if ctx.is_floating else tensor


class BF16Compressor(FP16Compressor):
    """A compressor to bfloat16: half of float32's bytes, for precision alone."""

    dtype = tf.bfloat16
    cast = "bf16"


class Compression(Compressions):
    __doc__ = Compressions.__doc__

    fp16 = FP16Compressor
    bf16 = BF16Compressor
