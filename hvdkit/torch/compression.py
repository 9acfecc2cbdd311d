"""The values of ``compression=``: codecs of hvdkit, and Horovod's classes with functions around an operation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hvdkit.api.gradients.compression import Compressions, Compressor, around, split
from hvdkit.api.operations import Invocation
from hvdkit.engine.ops.requests import ReduceRequest
from hvdkit.torch.ops.framework import apply, resolved


class FP16Compressor(Compressor):
    """Floating point tensors as float16, and both parts of complex ones: half the bytes, for range and precision."""

    dtype = torch.float16
    cast = "fp16"

    @classmethod
    def compress(cls, tensor: Tensor) -> tuple[Tensor, Any]:
        """Return the tensor, in 16 bits if it is floating point or complex, and its own type."""
        if tensor.is_complex():
            return torch.view_as_real(resolved(tensor)).to(cls.dtype), tensor.dtype
        return (tensor.to(cls.dtype) if tensor.is_floating_point() else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """Return the tensor in its own type."""
        if ctx.is_complex:
            return torch.view_as_complex(tensor.to(ctx.to_real()))
        return tensor.to(ctx) if ctx.is_floating_point else tensor


class BF16Compressor(FP16Compressor):
    """Floating point tensors as bfloat16: half of float32's bytes, for precision alone."""

    dtype = torch.bfloat16
    cast = "bf16"


class Compression(Compressions):
    __doc__ = Compressions.__doc__

    fp16 = FP16Compressor
    bf16 = BF16Compressor


def reduced(
    function: Any, invocation: Invocation, tensors: Sequence[Tensor], request: ReduceRequest, compression: Any
) -> list[Tensor]:
    """Return the results of an autograd function that reduces; tensors are compressed before it or on the way."""
    floating = {tensor.dtype: tensor.is_floating_point() or tensor.is_complex() for tensor in tensors}
    codec, compressor = split(invocation.function, compression, request.op, floating)
    encoded = request._replace(codec=codec)
    return around(compressor, tensors, lambda sent: apply(function, invocation, encoded, *sent))
