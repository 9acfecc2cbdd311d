"""Allreduce of tf.IndexedSlices: every rank gets all ranks' slices, which together are the sum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdkit.api import checks
from hvdkit.api.operations import Invocation
from hvdkit.kernels.reduce_op import ReduceOp
from hvdkit.tensorflow.ops import tensor_checks
from hvdkit.tensorflow.ops.gather import grouped_allgather


def allreduce_slices(asked: Invocation, slices: Sequence[Any], op: ReduceOp, factors: tuple[float, float]) -> list[Any]:
    """The sums or averages of IndexedSlices, in which an index that several ranks have stands several times.

    Raises NotImplementedError for other operations and for scale factors.
    """
    if op not in (ReduceOp.SUM, ReduceOp.AVERAGE):
        raise NotImplementedError(
            f"{asked.function}: hvd.{op.name.capitalize()} does not go with tf.IndexedSlices, only Sum and Average.\n"
            "HINT: use sparse_as_dense=True, or tf.convert_to_tensor()."
        )
    if factors != (1.0, 1.0):
        raise NotImplementedError(
            f"{asked.function}: prescale_factor and postscale_factor do not go with tf.IndexedSlices"
        )
    tensor_checks.check_process_set(asked.function, asked.process_set)
    parts = [part for one in slices for part in (one.values, one.indices)]
    gathered = grouped_allgather(parts, asked.name, asked.ignore_name_scope, asked.process_set)
    divisor = checks.size_of(asked.process_set) if op == ReduceOp.AVERAGE else 1
    return [
        tf.IndexedSlices(quotient(values, divisor), indices, dense_shape=one.dense_shape)
        for one, values, indices in zip(slices, gathered[::2], gathered[1::2], strict=True)
    ]


def quotient(values: Any, divisor: int) -> Any:
    """``values / divisor`` in the dtype of ``values``; of integers without their fraction, and exact."""
    if divisor == 1:
        return values
    if values.dtype.is_complex:  # whose division in TensorFlow rounds more than once
        return tf.complex(tf.math.real(values) / divisor, tf.math.imag(values) / divisor)
    if not values.dtype.is_integer:
        return values / divisor
    # TensorFlow divides integers as float64, which has 53 bits; and a narrow type may not hold the number of ranks.
    wide = tf.uint64 if values.dtype == tf.uint64 else tf.int64
    return tf.cast(tf.truncatediv(tf.cast(values, wide), tf.constant(divisor, wide)), values.dtype)
