"""What ``compression=`` takes in any framework: hvdkit's lossy codecs, or pairs of functions around an operation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from hvdkit.compression import CASTS, Codec, Codecs, LossyCodec
from hvdkit.kernels.reduce_op import ReduceOp


class Compressor:
    """Horovod's way: ``compress`` before the tensor travels, ``decompress`` after it came back.

    A class whose own ``cast`` names one of hvdkit's casts stands for that codec where gradients are planned.
    """

    cast: ClassVar[str]

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """The tensor to send and a context that ``decompress`` will be given."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """The tensor as the caller knows it."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends tensors as they are."""

    cast = "none"

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """The tensor itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """The tensor itself."""
        return tensor


class Compressions(Codecs):
    """Optional gradient compression.

    ``none``, ``fp16`` and ``bf16`` are taken as they are. The others are taken as they are or called with parameters,
    as in ``Compression.topk(ratio=0.01)``; all of these take ``feedback`` (True: what a step does not send is kept and
    sent later) and ``compress`` ("between_nodes", or "everywhere").
    """

    none = NoneCompressor


def lossy_codec(compression: Any) -> LossyCodec | None:
    """The codec of a codec or of its class; None for anything else."""
    if isinstance(compression, type) and issubclass(compression, LossyCodec):
        return compression()
    return compression if isinstance(compression, LossyCodec) else None


def codec_of(compression: Any) -> Codec | None:
    """The codec that a compression stands for; None for a class of the user's that compresses tensor by tensor."""
    kind = compression if isinstance(compression, type) else type(compression)  # fp16, and fp16()
    if issubclass(kind, Compressor) and "cast" in vars(kind):
        return CASTS[kind.cast]
    return lossy_codec(compression)


def check_compression(function: str, compression: Any) -> Any:
    """What compresses.

    Raises TypeError for what is no codec and has no functions ``compress`` and ``decompress``, and for a codec whose
    parameters ranks could not compare.
    """
    codec = lossy_codec(compression)
    if codec is not None:
        check_told_apart(function, codec)
    elif not all(callable(getattr(compression, method, None)) for method in ("compress", "decompress")):
        raise TypeError(
            f"{function}: compression must be one of hvd.Compression, such as hvd.Compression.fp16 or "
            "hvd.Compression.topk(0.01), a hvdkit.compression.CustomCodec, or a class with static compress(tensor) and "
            f"decompress(tensor, ctx), got {compression!r}"
        )
    return compression


def check_told_apart(function: str, codec: Codec) -> None:
    """Raises TypeError for a codec that keeps parameters by which ranks could not tell it from another one."""
    if hidden := codec.parameters_not_in_summary():
        raise TypeError(
            f"{function}: compression: {type(codec).__name__} keeps {', '.join(hidden)} outside of dataclass fields: "
            "ranks cannot tell whether theirs are the same.\n"
            "HINT: make the class a @dataclass(frozen=True) with a field for each parameter, and no __init__ of its "
            "own; what is no parameter has a name that begins with _."
        )


def check_codec_op(function: str, codec: Codec, op: ReduceOp) -> None:
    """Raises ValueError for a codec whose payloads cannot be reduced by an operation."""
    if codec.encodes and op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
        raise ValueError(
            f"{function}: Compression.{codec.name} cannot do op=hvd.{op.name.capitalize()}, only Average and Sum.\n"
            "HINT: Compression.none, fp16 and bf16 can."
        )


def check_codec_dtypes(function: str, codec: Codec, floating: Mapping[Any, bool]) -> None:
    """Raises ValueError where a dtype, which the mapping says, is neither floating nor complex."""
    for dtype, floats in floating.items():
        if not floats:
            raise ValueError(
                f"{function}: Compression.{codec.name} cannot do {dtype}, only floating and complex types.\n"
                "HINT: use Compression.none for integers."
            )


def check_operation(function: str, codec: LossyCodec) -> None:
    """Raises ValueError for a codec that lives on what it keeps from step to step."""
    if codec.needs_state:
        raise ValueError(
            f"{function}: Compression.{codec.name} lives on what it keeps from step to step, which needs a "
            "DistributedOptimizer.\nHINT: use Compression.topk or int8 here."
        )
    if codec.warmup_steps:
        raise ValueError(
            f"{function}: Compression.{codec.name}(warmup_epochs=...) counts steps, which needs a "
            "DistributedOptimizer.\nHINT: leave warmup_epochs out here."
        )


def split(
    function: str, compression: Any, op: ReduceOp, floating: Mapping[Any, bool]
) -> tuple[Codec, type[Compressor]]:
    """The codec for the wire, and the class for before and after; one of them does nothing.

    ``floating``: of the tensors' dtypes, whether they are floating or complex types. Raises TypeError for what does not
    compress, ValueError for an operation or a dtype that a codec cannot do.
    """
    if compression is NoneCompressor:
        return CASTS["none"], compression
    check_compression(function, compression)
    codec = lossy_codec(compression)
    if codec is None:
        return CASTS["none"], compression
    check_codec_op(function, codec, op)
    check_codec_dtypes(function, codec, floating)
    check_operation(function, codec)
    return codec, NoneCompressor


def around(
    compressor: type[Compressor], tensors: Sequence[Any], operate: Callable[[Sequence[Any]], Sequence[Any]]
) -> list[Any]:
    """What ``operate`` makes of the tensors that were compressed before, decompressed."""
    if compressor is NoneCompressor:
        return list(operate(tensors))
    sent, contexts = zip(*(compressor.compress(tensor) for tensor in tensors), strict=True)
    return [compressor.decompress(came, context) for came, context in zip(operate(sent), contexts, strict=True)]
