"""The values of ``compression=`` in any framework, and the codec of each gradient.

They are hvdkit's codecs, Horovod-style classes with functions around an operation, or the user's patterns or function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod
from typing import Any, ClassVar

from hvdkit.api.gradients.planning import plain_name
from hvdkit.compression import CASTS, Codec, Codecs, LossyCodec
from hvdkit.kernels.reduce_op import ReduceOp

# For tensors of fewer elements, the payload and the cost of encoding exceed the tensor.
SMALL_ELEMENTS = 1024
NAMES_LISTED = 5


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
    """Return ``compression``. Raises TypeError unless it is a comparable codec, or can compress and decompress."""
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
            "ranks cannot compare their values.\n"
            "HINT: make the class a @dataclass(frozen=True) with a field for each parameter, and no __init__ of its "
            "own; begin the names of all other attributes with _."
        )


def _check_op(function: str, codec: Codec, op: ReduceOp) -> None:
    """Raise ValueError for a codec whose payloads cannot be reduced by an operation."""
    if codec.encodes and op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
        raise ValueError(
            f"{function}: Compression.{codec.name} does not support op=hvd.{op.name.capitalize()}, only Average and "
            "Sum.\nHINT: use Compression.none, fp16 or bf16."
        )


def split(
    function: str, compression: Any, op: ReduceOp, floating: Mapping[Any, bool]
) -> tuple[Codec, type[Compressor]]:
    """Return the codec for the wire, and the class for before and after the operation; one of them does nothing.

    ``floating`` maps the tensors' dtypes to True if they are floating or complex. Raises TypeError or ValueError for a
    wrong compression, or a codec that cannot do it.
    """
    if compression is NoneCompressor:
        return CASTS["none"], compression
    codec = lossy_codec(check_compression(function, compression))
    if codec is None:
        return CASTS["none"], compression
    _check_op(function, codec, op)
    title = f"{function}: Compression.{codec.name}"
    for dtype, is_floating in floating.items():
        if not is_floating:
            raise ValueError(
                f"{title} does not support {dtype}, only floating and complex types.\n"
                "HINT: use Compression.none for integers."
            )
    if codec.needs_state:
        raise ValueError(
            f"{title} keeps a state from step to step, which needs a DistributedOptimizer.\n"
            "HINT: use Compression.topk or int8 here."
        )
    if codec.warmup_steps:
        raise ValueError(
            f"{title}(warmup_epochs=...) counts steps, which needs a DistributedOptimizer.\n"
            "HINT: leave warmup_epochs out here."
        )
    return codec, NoneCompressor


def around(
    compressor: type[Compressor], tensors: Sequence[Any], operate: Callable[[Sequence[Any]], Sequence[Any]]
) -> list[Any]:
    """Compress tensors, ``operate`` on them, and return the results decompressed."""
    if compressor is NoneCompressor:
        return list(operate(tensors))
    sent, contexts = zip(*map(compressor.compress, tensors), strict=True)
    return list(map(compressor.decompress, operate(sent), contexts))


@dataclass(frozen=True)
class Policy:
    """The user's ``compression``, which gives a codec for the name and the parameter of a gradient.

    Of a mapping from patterns of names (as in a shell: ``"*.weight"``) to codecs the first match holds. A gradient that
    no pattern matches, or for which a function ``(name, parameter) -> codec`` returns None, stays dense.
    """

    compression: Any = NoneCompressor

    @property
    def by_pattern(self) -> bool:
        """True if the user chooses the codec for each parameter."""
        return isinstance(self.compression, Mapping) or (
            callable(self.compression)
            and not isinstance(self.compression, type | LossyCodec)
            and not callable(getattr(self.compression, "compress", None))
        )

    @property
    def whole_tensors(self) -> bool:
        """True if a Horovod-style class compresses tensor by tensor, around operations by name."""
        return not self.by_pattern and codec_of(self.compression) is None

    def codec(self, name: str, parameter: Any) -> Codec:
        """Return the codec of a gradient. Raises TypeError if the user's choice is no codec."""
        if not self.by_pattern:
            codec = codec_of(self.compression)
            assert codec is not None
            return codec if codec.all_tensors or _is_worth_it(parameter) else CASTS["none"]
        plain = plain_name(name)
        if isinstance(self.compression, Mapping):
            choices = self.compression.items()
            chosen = next((choice for pattern, choice in choices if fnmatchcase(plain, pattern)), None)
        else:
            chosen = self.compression(plain, parameter)
        return _codec_or_dense(f"DistributedOptimizer: compression of '{name}'", chosen)

    def is_lossy_for(self, name: str, parameter: Any) -> bool:
        """True if this gradient is to be encoded, by more than a cast."""
        return not self.whole_tensors and self.codec(name, parameter).encodes

    def complaint(self, names: Sequence[str]) -> str | None:
        """Return a warning if the user's patterns match none of these names, so that nothing is compressed."""
        patterns = list(self.compression) if isinstance(self.compression, Mapping) else []
        plain = list(dict.fromkeys(map(plain_name, names)))
        if not patterns or any(fnmatchcase(name, pattern) for name in plain for pattern in patterns):
            return None
        listed = ", ".join(repr(name) for name in plain[:NAMES_LISTED]) + (", ..." if len(plain) > NAMES_LISTED else "")
        return (
            f"compression: none of the patterns {patterns} matches a gradient, so nothing is compressed. "
            f"The gradients here are {listed}.\n"
            "HINT: write patterns that match these names ('*' matches all). In PyTorch these are the names in "
            "named_parameters= (pass it if you did not); in Keras they are the name of a layer and of a variable, "
            "without the numbers of layers. A function gets the parameter too."
        )

    def choose(self, parameters: Sequence[tuple[str, Any]]) -> tuple[list[Codec], list[int]]:
        """Return the different codecs, and for each parameter the number of its codec."""
        chosen = [self.codec(name, parameter) for name, parameter in parameters]
        codecs = {codec.summary: codec for codec in chosen}
        numbers = {summary: number for number, summary in enumerate(codecs)}
        return list(codecs.values()), [numbers[codec.summary] for codec in chosen]


def _is_worth_it(parameter: Any) -> bool:
    """True if compression pays for a gradient: not for biases, the weights of norms, and small tensors."""
    if getattr(parameter.shape, "rank", 0) is None:  # a tf.Variable of any shape
        return False
    shape = tuple(parameter.shape)
    return len(shape) > 1 and None not in shape and prod(shape) >= SMALL_ELEMENTS


def _codec_or_dense(title: str, compression: Any) -> Codec:
    """Return the codec for the user's choice. Raises TypeError, which begins with ``title``, if it is no codec."""
    codec = CASTS["none"] if compression is None else codec_of(compression)
    if codec is None:
        raise TypeError(f"{title} must be one of hvd.Compression or None, got {compression!r}")
    return codec


def check_policy(function: str, compression: Any, op: ReduceOp) -> Policy:
    """Return the policy for the user's argument. Raises TypeError or ValueError for one that cannot do ``op``."""
    policy = Policy(compression)
    if not policy.by_pattern:
        _check_op(function, codec_of(check_compression(function, compression)) or CASTS["none"], op)
    elif op is ReduceOp.ADASUM:
        raise ValueError(f"{function}: op=hvd.Adasum takes one compression for all parameters, not one for each")
    elif isinstance(compression, Mapping):
        for pattern, choice in compression.items():
            if not isinstance(pattern, str):
                raise TypeError(f"{function}: compression: patterns must be strings, got {pattern!r}")
            _check_op(function, _codec_or_dense(f"{function}: compression[{pattern!r}]", choice), op)
    elif op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
        raise ValueError(f"{function}: a function for compression works only with op=hvd.Average or Sum")
    return policy
