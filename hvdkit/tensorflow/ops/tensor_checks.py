"""Checks of tensor arguments. Each error names the function and the argument."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import tensorflow as tf

from hvdkit.api import checks
from hvdkit.api.operations import Invocation
from hvdkit.engine.session import runtime

# Dictionaries, since the comparison of dtypes is slow and these are looked up by hash.
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


def check_arguments(invocation: Invocation) -> None:
    """Raise NotInitializedError before init, TypeError or ValueError for a wrong name or process set."""
    runtime.engine()
    checks.check_name(invocation.function, invocation.name)
    check_process_set(invocation.function, invocation.process_set)


def check_process_set(function: str, process_set: Any) -> None:
    """Raise TypeError or ValueError unless the process set is registered and, in eager execution, has this rank.

    A graph may hold operations of sets that it runs only if this rank is a member, as ``tf.cond`` does.
    """
    if tf.executing_eagerly():
        checks.check_process_set(function, process_set)
    else:
        checks.check_registered(function, process_set)


def check_tensor(function: str, tensor: Any, dtypes: Collection[Any], argument: str = "tensor") -> Any:
    """Return a tensor, a variable, or what TensorFlow makes a tensor of, as a tensor.

    Raise TypeError for anything else, ValueError unless the tensor is dense and of one of ``dtypes``.
    """
    dense = tensor if isinstance(tensor, tf.Tensor) else _made_tensor(function, tensor, argument)
    if dense.dtype not in dtypes:
        raise checks.wrong_dtype(function, argument, [dtype.name for dtype in dtypes], dense.dtype.name)
    return dense


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
    """Return the tensors of a grouped operation as a list. Raise TypeError or ValueError."""
    checks.check_listed(function, tensors, (tf.Tensor, tf.Variable))
    return [check_tensor(function, tensor, dtypes, f"tensors[{index}]") for index, tensor in enumerate(tensors)]


def check_has_rows(function: str, tensors: Sequence[Any]) -> None:
    """Raise ValueError for a scalar, since the operation works along the first dimension."""
    checks.check_has_rows(function, [() for tensor in tensors if tensor.shape.rank == 0], SCALAR_TO_ROW)


def check_integers(function: str, argument: str, numbers: Any) -> Any:
    """Return integers as a tensor. Raise TypeError for no numbers, ValueError for other dtypes and dimensions."""
    try:
        vector = tf.convert_to_tensor(numbers)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{function}: {argument} must be a list or 1-d tensor of integers: {error}") from None
    if not vector.dtype.is_integer:
        raise checks.no_integers(function, argument, vector.dtype.name)
    if vector.shape.rank not in (1, None):
        raise ValueError(f"{function}: {argument} must have one dimension, got the shape {vector.shape}")
    return vector
