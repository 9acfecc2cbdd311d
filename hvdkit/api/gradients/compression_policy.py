"""The choice of a codec for each gradient: one codec for all large gradients, or the user's patterns or function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod
from typing import Any

from hvdkit.api.gradients.compression import NoneCompressor, check_codec_op, check_compression, codec_of
from hvdkit.api.gradients.planning import plain_name
from hvdkit.compression import CASTS, Codec, LossyCodec
from hvdkit.kernels.reduce_op import ReduceOp

# For tensors of fewer elements, the payload and the cost of encoding exceed the tensor.
SMALL_ELEMENTS = 1024
NAMES_LISTED = 5


@dataclass(frozen=True)
class Policy:
    """The user's ``compression``, which gives a codec for the name and the parameter of a gradient.

    ``compression`` is one of hvd.Compression, a Horovod-style class, a mapping from patterns of names (as in a shell:
    ``"*.weight"``) to codecs, of which the first match holds, or a function ``(name, parameter) -> codec``. A gradient
    that no pattern matches, or for which the function returns None, stays dense.
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

    @property
    def by_tensor(self) -> bool:
        """True if the compression itself can compress a tensor around an operation."""
        return not self.by_pattern and not (codec_of(self.compression) or CASTS["none"]).encodes

    def codec(self, name: str, parameter: Any) -> Codec:
        """Return the codec of a gradient. Raises TypeError if the user's choice is no codec."""
        if not self.by_pattern:
            codec = codec_of(self.compression)
            assert codec is not None
            return codec if codec.all_tensors or is_worth_it(parameter) else CASTS["none"]
        if isinstance(self.compression, Mapping):
            choices = self.compression.items()
            chosen = next((choice for pattern, choice in choices if _matches(name, pattern)), None)
        else:
            chosen = self.compression(plain_name(name), parameter)
        return _codec_or_dense(f"DistributedOptimizer: compression of '{name}'", chosen)

    def is_lossy_for(self, name: str, parameter: Any) -> bool:
        """True if this gradient is to be encoded, by more than a cast."""
        return not self.whole_tensors and self.codec(name, parameter).encodes

    def complaint(self, names: Sequence[str]) -> str | None:
        """Return a warning if the user's patterns match none of these names, so that nothing is compressed."""
        patterns = list(self.compression) if isinstance(self.compression, Mapping) else []
        if not patterns or any(_matches(name, pattern) for name in names for pattern in patterns):
            return None
        plain = list(dict.fromkeys(map(plain_name, names)))
        listed = ", ".join(repr(name) for name in plain[:NAMES_LISTED]) + (", ..." if len(plain) > NAMES_LISTED else "")
        return (
            f"compression: none of the patterns {patterns} matches a gradient, so nothing is compressed. "
            f"The gradients here are {listed}.\n"
            "HINT: write patterns of these names ('*' matches all). In PyTorch they are those of named_parameters=, in "
            "Keras a layer's and a variable's name, without the numbers of layers; a function gets the parameter too."
        )

    def choose(self, parameters: Sequence[tuple[str, Any]]) -> tuple[list[Codec], list[int]]:
        """Return the different codecs, and for each parameter the number of its codec."""
        codecs: dict[str, Codec] = {}  # by summary
        numbers: dict[str, int] = {}
        chosen = []
        for name, parameter in parameters:
            codec = self.codec(name, parameter)
            summary = codec.summary
            codecs.setdefault(summary, codec)
            chosen.append(numbers.setdefault(summary, len(numbers)))
        return list(codecs.values()), chosen


def is_worth_it(parameter: Any) -> bool:
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


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(plain_name(name), pattern)


def check_policy(function: str, compression: Any, op: ReduceOp) -> Policy:
    """Return the policy for the user's argument.

    Raises TypeError for a wrong compression, ValueError for a codec that cannot do the operation.
    """
    policy = Policy(compression)
    if not policy.by_pattern:
        check_compression(function, compression)
        check_codec_op(function, codec_of(compression) or CASTS["none"], op)
    elif op is ReduceOp.ADASUM:
        raise ValueError(f"{function}: compression for each parameter does not go with op=hvd.Adasum, only for all")
    elif isinstance(compression, Mapping):
        for pattern, choice in compression.items():
            if not isinstance(pattern, str):
                raise TypeError(f"{function}: compression: patterns must be strings, got {pattern!r}")
            check_codec_op(function, _codec_or_dense(f"{function}: compression[{pattern!r}]", choice), op)
    elif op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
        raise ValueError(f"{function}: a function for compression goes with op=hvd.Average or Sum only")
    return policy
