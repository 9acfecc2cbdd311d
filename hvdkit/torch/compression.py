"""What ``compression=`` takes: codecs of hvdkit, and Horovod's classes, a pair of functions around an operation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hvdkit.api.gradients.compression import Compressions, Compressor, around, split
from hvdkit.api.operations import Asked
from hvdkit.engine.ops.requests import ReduceRequest
from hvdkit.torch.ops.framework import apply, resolved


class FP16Compressor(Compressor):
    """Sends floating point tensors as float16: half of float32's bytes, for range and precision.

    Of complex tensors both parts of each element.
    """

    dtype = torch.float16
    cast = "fp16"

    @classmethod
    def compress(cls, tensor: Tensor) -> tuple[Tensor, Any]:
        """The tensor in 16 bits if it is floating point or complex, and its own type."""
        if tensor.is_complex():
            return torch.view_as_real(resolved(tensor)).to(cls.dtype), tensor.dtype
        return (tensor.to(cls.dtype) if tensor.is_floating_point() else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """The tensor in the type that it had."""
        if ctx.is_complex:
            return torch.view_as_complex(tensor.to(ctx.to_real()))
        return tensor.to(ctx) if ctx.is_floating_point else tensor


class BF16Compressor(FP16Compressor):
    """Sends floating point tensors as bfloat16: half of float32's bytes, for precision alone."""

    dtype = torch.bfloat16
    cast = "bf16"


class Compression(Compressions):
    """Codecs for ``compression=``: what gradients are encoded in while they travel.

    ``none``, ``fp16`` and ``bf16`` are taken as they are. ``int8``, ``int4``, ``onebit``, ``topk``, ``threshold``,
    ``randomk``, ``dgc`` and ``powersgd`` are taken as they are or called with parameters; all of these take
    ``feedback`` (True: what a step does not send is kept and sent later) and ``compress`` ("between_nodes": the ranks
    of a node sum densely; or "everywhere"). They do Average and Sum of floating dtypes, of any shape. Raises ValueError
    or TypeError for parameters that make no sense.

    Examples:
        >>> hvd.Compression.topk(ratio=0.01).summary
        "topk(feedback=True, compress='between_nodes', ratio=0.01, seed=0, warmup_epochs=0, steps_per_epoch=1)"
    """

    fp16 = FP16Compressor
    bf16 = BF16Compressor


def reduced(
    function: Any, asked: Asked, tensors: Sequence[Tensor], request: ReduceRequest, compression: Any
) -> list[Tensor]:
    """What an autograd function that reduces makes of tensors, which are compressed before or on the way."""
    floating = {tensor.dtype: tensor.is_floating_point() or tensor.is_complex() for tensor in tensors}
    codec, compressor = split(asked.function, compression, request.op, floating)
    encoded = request._replace(codec=codec)
    return around(compressor, tensors, lambda sent: apply(function, asked, encoded, *sent))
