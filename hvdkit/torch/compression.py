"""What ``compression=`` takes: codecs of hvdkit, and Horovod's classes, a pair of functions around an operation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hvdkit.compression import CASTS, DGC, Codec, Int4, Int8, LossyCodec, OneBit, PowerSGD, RandomK, Threshold, TopK
from hvdkit.kernels.reduce_op import ReduceOp


class Compressor:
    """Horovod's way: ``compress`` before the tensor travels, ``decompress`` after it came back."""

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

    dtype = torch.float16

    @classmethod
    def compress(cls, tensor: Tensor) -> tuple[Tensor, Any]:
        """The tensor in 16 bits if it is floating point, and its own type."""
        return (tensor.to(cls.dtype) if tensor.dtype.is_floating_point else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """The tensor in the type that it had."""
        return tensor.to(ctx) if ctx.is_floating_point else tensor


class BF16Compressor(FP16Compressor):
    """Sends floating point tensors as bfloat16: half of float32's bytes, for precision alone."""

    dtype = torch.bfloat16


class Compression:
    """Optional gradient compression.

    ``none``, ``fp16`` and ``bf16`` are taken as they are. The others are taken as they are or called with parameters,
    as in ``Compression.topk(ratio=0.01)``; all of these take ``feedback`` (True: what a step does not send is kept and
    sent later) and ``compress`` ("between_nodes", or "everywhere").
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
    int8 = Int8
    int4 = Int4
    onebit = OneBit
    topk = TopK
    threshold = Threshold
    randomk = RandomK
    dgc = DGC
    powersgd = PowerSGD


_CASTS: tuple[tuple[Any, str], ...] = ((NoneCompressor, "none"), (FP16Compressor, "fp16"), (BF16Compressor, "bf16"))


def codec_of(compression: Any) -> Codec | None:
    """The codec that a compression stands for; None for a class of the user's that compresses tensor by tensor."""
    for known, cast in _CASTS:
        if compression is known:
            return CASTS[cast]
    if isinstance(compression, type) and issubclass(compression, LossyCodec):
        return compression()
    return compression if isinstance(compression, LossyCodec) else None


def check_compression(function: str, compression: Any) -> Any:
    """What compresses. Raises TypeError for what is no codec and has no functions ``compress`` and ``decompress``."""
    if codec_of(compression) is None and not all(
        callable(getattr(compression, method, None)) for method in ("compress", "decompress")
    ):
        raise TypeError(
            f"{function}: compression must be one of hvd.Compression, such as hvd.Compression.fp16 or "
            "hvd.Compression.topk(0.01), a hvdkit.compression.CustomCodec, or a class with static compress(tensor) and "
            f"decompress(tensor, ctx), got {compression!r}"
        )
    return compression


def check_codec_op(function: str, codec: Codec, op: ReduceOp) -> None:
    """Raises ValueError for a codec whose payloads cannot be reduced by an operation."""
    if isinstance(codec, LossyCodec) and op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
        raise ValueError(
            f"{function}: Compression.{codec.name} cannot do op=hvd.{op.name.capitalize()}, only Average and Sum.\n"
            "HINT: Compression.none, fp16 and bf16 can."
        )


def split_compression(
    function: str, compression: Any, op: ReduceOp, tensors: Sequence[Tensor]
) -> tuple[Codec, type[Compressor]]:
    """The codec for the wire, and the class for before and after; one of them does nothing.

    Raises TypeError for what does not compress, ValueError for an operation or a tensor that a codec cannot do.
    """
    check_compression(function, compression)
    codec = codec_of(compression)
    if not isinstance(codec, LossyCodec):
        return CASTS["none"], compression
    check_codec_op(function, codec, op)
    for tensor in tensors:
        if not tensor.dtype.is_floating_point:
            raise ValueError(
                f"{function}: Compression.{codec.name} cannot do {tensor.dtype}, only floating types.\n"
                "HINT: use Compression.none for integers."
            )
    if isinstance(codec, DGC | PowerSGD):
        raise ValueError(
            f"{function}: Compression.{codec.name} lives on what it keeps from step to step, which needs a "
            "DistributedOptimizer.\nHINT: use Compression.topk or int8 here."
        )
    if codec.warmup_steps:
        raise ValueError(
            f"{function}: Compression.{codec.name}(warmup_epochs=...) counts steps, which needs a "
            "DistributedOptimizer.\nHINT: leave warmup_epochs out here."
        )
    return codec, NoneCompressor
