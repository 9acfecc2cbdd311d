"""The values of ``compression=`` in any framework: hvdkit's codecs, and classes with functions around an operation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from hvdkit.compression import CASTS, Codec, Codecs, LossyCodec
from hvdkit.kernels.reduce_op import ReduceOp


class Compressor:
    """Horovod's interface: ``compress`` before the tensor travels, ``decompress`` afterwards.

    ``cast``, if a class itself has it, names the cast of hvdkit that planned gradients use instead.
    """

    cast: ClassVar[str]

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return the tensor to send and a context for ``decompress``."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return the tensor in the caller's form."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Tensors as they are."""

    cast = "none"

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return the tensor itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return the tensor itself."""
        return tensor


class Compressions(Codecs):
    """Codecs for ``compression=``, which encode gradients for their way between ranks.

    ``none``, ``fp16`` and ``bf16`` are taken as they are. ``int8``, ``int4``, ``onebit``, ``topk``, ``threshold``,
    ``randomk``, ``dgc`` and ``powersgd`` are taken as they are or called with parameters; all of these take
    ``feedback`` (True: what a step does not send is kept and sent later) and ``compress`` ("between_nodes": the ranks
    of a node sum densely; or "everywhere"). They do Average and Sum of floating dtypes, of any shape. Raises ValueError
    or TypeError for parameters that make no sense.

    Examples:
        >>> hvd.Compression.topk(ratio=0.01).summary
        "topk(feedback=True, compress='between_nodes', ratio=0.01, seed=0, warmup_epochs=0, steps_per_epoch=1)"
    """

    none = NoneCompressor


def lossy_codec(compression: Any) -> LossyCodec | None:
    """Return the codec for a codec or its class; None for anything else."""
    if isinstance(compression, type) and issubclass(compression, LossyCodec):
        return compression()
    return compression if isinstance(compression, LossyCodec) else None


def codec_of(compression: Any) -> Codec | None:
    """Return the codec for a compression; None for a class of the user's that compresses tensor by tensor."""
    kind = compression if isinstance(compression, type) else type(compression)  # fp16, and fp16()
    if issubclass(kind, Compressor) and "cast" in vars(kind):
        return CASTS[kind.cast]
    return lossy_codec(compression)


def check_compression(function: str, compression: Any) -> Any:
    """Return ``compression``.

    Raises TypeError unless it is a codec, whose parameters ranks can compare, or has ``compress`` and ``decompress``.
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
    """Raise TypeError for a codec with parameters that ranks cannot compare."""
    if hidden := codec.parameters_not_in_summary():
        raise TypeError(
            f"{function}: compression: {type(codec).__name__} keeps {', '.join(hidden)} outside of dataclass fields: "
            "ranks cannot tell whether theirs are the same.\n"
            "HINT: make the class a @dataclass(frozen=True) with a field for each parameter, and no __init__ of its "
            "own; what is no parameter has a name that begins with _."
        )


def check_codec_op(function: str, codec: Codec, op: ReduceOp) -> None:
    """Raise ValueError for a codec whose payloads cannot be reduced by an operation."""
    if codec.encodes and op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
        raise ValueError(
            f"{function}: Compression.{codec.name} cannot do op=hvd.{op.name.capitalize()}, only Average and Sum.\n"
            "HINT: Compression.none, fp16 and bf16 can."
        )


def split(
    function: str, compression: Any, op: ReduceOp, floating: Mapping[Any, bool]
) -> tuple[Codec, type[Compressor]]:
    """Return the codec for the wire, and the class for before and after the operation; one of them does nothing.

    ``floating`` maps the tensors' dtypes to True if they are floating or complex. Raises TypeError for a wrong
    compression, ValueError for a codec that cannot do the operation or a dtype, or needs an optimizer.
    """
    if compression is NoneCompressor:
        return CASTS["none"], compression
    check_compression(function, compression)
    codec = lossy_codec(compression)
    if codec is None:
        return CASTS["none"], compression
    check_codec_op(function, codec, op)
    for dtype, is_floating in floating.items():
        if not is_floating:
            raise ValueError(
                f"{function}: Compression.{codec.name} cannot do {dtype}, only floating and complex types.\n"
                "HINT: use Compression.none for integers."
            )
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
    return codec, NoneCompressor


def around(
    compressor: type[Compressor], tensors: Sequence[Any], operate: Callable[[Sequence[Any]], Sequence[Any]]
) -> list[Any]:
    """Compress tensors, ``operate`` on them, and return the results decompressed."""
    if compressor is NoneCompressor:
        return list(operate(tensors))
    sent, contexts = zip(*(compressor.compress(tensor) for tensor in tensors), strict=True)
    return [compressor.decompress(result, context) for result, context in zip(operate(sent), contexts, strict=True)]
