"""Horovod's compression classes: a pair of static functions around a collective operation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Compressor:
    """What ``compression=`` takes: ``compress`` before the tensor travels, ``decompress`` after it came back."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """The tensor to send and a context that ``decompress`` will be given."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """The tensor as the caller knows it."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends tensors as they are."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """The tensor itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """The tensor itself."""
        return tensor


class FP16Compressor(Compressor):
    """Sends floating point tensors as float16: half of float32's bytes, for range and precision."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """The tensor in float16 if it is floating point, and its own type."""
        return (tensor.to(torch.float16) if tensor.dtype.is_floating_point else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """The tensor in the type that it had."""
        return tensor.to(ctx) if ctx.is_floating_point else tensor


class Compression:
    """Optional gradient compression: ``Compression.none`` (the default) or ``Compression.fp16``."""

    none = NoneCompressor
    fp16 = FP16Compressor
