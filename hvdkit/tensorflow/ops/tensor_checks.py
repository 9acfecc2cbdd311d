"""What the caller may have got wrong with tensors: each check names the function and the argument."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import tensorflow as tf

from hvdkit.api import checks
from hvdkit.api.operations import Asked
from hvdkit.engine.session import runtime

# Dictionaries, since dtypes compare slowly and these are looked up by hash.
REDUCIBLE_DTYPES = dict.fromkeys(
    (
        *(tf.uint8, tf.int8, tf.uint16, tf.int16, tf.uint32, tf.int32, tf.uint64, tf.int64),
        *(tf.float16, tf.bfloat16, tf.float32, tf.float64),
        *(tf.complex64, tf.complex128),
    )
)
MOVABLE_DTYPES = dict.fromkeys((*REDUCIBLE_DTYPES, tf.bool))

# For hints.
SCALAR_TO_ROW = "tf.reshape(tensor, [1])"


def check_asked(asked: Asked) -> None:
    """Raises NotInitializedError before init, TypeError or ValueError for a name or a process set there cannot be."""
    runtime.engine()
    checks.check_name(asked.function, asked.name)
    check_process_set(asked.function, asked.process_set)


def check_process_set(function: str, process_set: Any) -> None:
    """Raises TypeError or ValueError unless it is registered and, where the operation runs now, has this rank.

    A graph may hold operations of sets that it runs only if this rank is a member, as ``tf.cond`` does.
    """
    if tf.executing_eagerly():
        checks.check_process_set(function, process_set)
    else:
        checks.check_registered(function, process_set)


def check_tensor(function: str, tensor: Any, dtypes: Collection[Any], argument: str = "tensor") -> Any:
    """The dense tensor of a tensor, a variable, or what TensorFlow makes one of.

    Raises TypeError for what is none, ValueError unless it is dense and of one of ``dtypes``.
    """
    found = tensor if isinstance(tensor, tf.Tensor) else _made_tensor(function, tensor, argument)
    if found.dtype not in dtypes:
        raise checks.wrong_dtype(function, argument, [dtype.name for dtype in dtypes], found.dtype.name)
    return found


def _made_tensor(function: str, tensor: Any, argument: str) -> Any:
    if isinstance(tensor, tf.IndexedSlices | tf.SparseTensor | tf.RaggedTensor):
        raise ValueError(
            f"{function}: {argument} must be dense, got a tf.{type(tensor).__name__}\n"
            "HINT: use tf.convert_to_tensor(), tf.sparse.to_dense(), or gather values and indices by themselves."
        )
    try:
        return tf.convert_to_tensor(tensor)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{function}: {argument} must be a tf.Tensor or tf.Variable, got {tensor!r}: {error}") from None


def check_tensors(function: str, tensors: Any, dtypes: Collection[Any]) -> list[Any]:
    """The tensors of a grouped operation as a list. Raises TypeError or ValueError."""
    checks.check_listed(function, tensors, (tf.Tensor, tf.Variable))
    return [check_tensor(function, tensor, dtypes, f"tensors[{index}]") for index, tensor in enumerate(tensors)]


def check_has_rows(function: str, tensors: Sequence[Any]) -> None:
    """Raises ValueError for a scalar: the operation works along the first dimension."""
    checks.check_has_rows(function, [() for tensor in tensors if tensor.shape.rank == 0], SCALAR_TO_ROW)


def check_integers(function: str, argument: str, numbers: Any) -> Any:
    """A vector of integers as a tensor. Raises TypeError for what TensorFlow makes no tensor of, ValueError else."""
    try:
        found = tf.convert_to_tensor(numbers)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{function}: {argument} must be a list or 1-d tensor of integers: {error}") from None
    if not found.dtype.is_integer:
        raise checks.no_integers(function, argument, found.dtype.name)
    if found.shape.rank not in (1, None):
        raise ValueError(f"{function}: {argument} must have one dimension, got the shape {found.shape}")
    return found
