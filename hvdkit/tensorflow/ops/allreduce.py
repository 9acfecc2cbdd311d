"""Allreduce: every rank gets the same reduction of all ranks' tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdkit.api import checks
from hvdkit.api.gradients import guard
from hvdkit.api.operations import Invocation
from hvdkit.engine.session import runtime
from hvdkit.engine.session.process_sets import ProcessSet, global_process_set
from hvdkit.kernels.reduce_op import ReduceOp
from hvdkit.tensorflow.compression import Compression
from hvdkit.tensorflow.ops import tensor_checks
from hvdkit.tensorflow.ops.bridge import as_written
from hvdkit.tensorflow.ops.gather import grouped_allgather
from hvdkit.tensorflow.ops.reduction import allreduce_dense, compressed


def _allreduce_dense(
    invocation: Invocation,
    tensors: Sequence[Any],
    compression: Any,
    op: ReduceOp,
    factors: tuple[Any, Any],
    device: str,
) -> list[Any]:
    """Reduce dense tensors of dtypes that can be reduced. Raise TypeError or ValueError for the other arguments."""
    tensor_checks.check_arguments(invocation)
    if op not in (ReduceOp.AVERAGE, ReduceOp.SUM):  # which are defined for all dtypes
        dtypes = [tensor.dtype.name for tensor in tensors]
        checks.check_op_for(invocation.function, op, dtypes)
        if op == ReduceOp.ADASUM:
            checks.check_adasum(invocation.function, dtypes, invocation.process_set, runtime.topology().size)
    results = compressed(invocation, tensors, compression, op, factors, device, allreduce_dense)
    guard.mark(results)
    return results


def _allreduce_slices(
    invocation: Invocation, slices: Sequence[Any], op: ReduceOp, factors: tuple[Any, Any]
) -> list[Any]:
    """Gather all ranks' slices, which together are the sum. An index that several ranks have stands several times.

    Raise NotImplementedError for other operations than Sum and Average and for scale factors.
    """
    if op not in (ReduceOp.SUM, ReduceOp.AVERAGE):
        raise NotImplementedError(
            f"{invocation.function}: hvd.{op.name.capitalize()} does not go with tf.IndexedSlices, only Sum and "
            "Average.\nHINT: use sparse_as_dense=True, or tf.convert_to_tensor()."
        )
    if factors != (1.0, 1.0):
        raise NotImplementedError(
            f"{invocation.function}: prescale_factor and postscale_factor do not go with tf.IndexedSlices"
        )
    tensor_checks.check_process_set(invocation.function, invocation.process_set)
    parts = [part for tensor in slices for part in (tensor.values, tensor.indices)]
    gathered = grouped_allgather(parts, invocation.name, invocation.ignore_name_scope, invocation.process_set)
    divisor = checks.size_of(invocation.process_set) if op == ReduceOp.AVERAGE else 1
    return [
        tf.IndexedSlices(quotient(values, divisor), indices, dense_shape=tensor.dense_shape)
        for tensor, values, indices in zip(slices, gathered[::2], gathered[1::2], strict=True)
    ]


def quotient(values: Any, divisor: int) -> Any:
    """Return ``values / divisor`` in the dtype of ``values``. Integers are divided exactly and cut off."""
    if divisor == 1:
        return values
    if values.dtype.is_complex:  # whose division in TensorFlow rounds more than once
        return tf.complex(tf.math.real(values) / divisor, tf.math.imag(values) / divisor)
    if not values.dtype.is_integer:
        return values / divisor
    # TensorFlow divides integers as float64, which has 53 bits; and a narrow type may not hold the number of ranks.
    wide = tf.uint64 if values.dtype == tf.uint64 else tf.int64
    return tf.cast(tf.truncatediv(tf.cast(values, wide), tf.constant(divisor, wide)), values.dtype)


@as_written
def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """Reduce a tensor over all ranks of ``process_set``; the average unless ``op`` says otherwise.

    Differentiable: the gradient is reduced in the same way. The values and indices of IndexedSlices are gathered.

    Args:
        tensor: a tf.Tensor, tf.Variable or tf.IndexedSlices, of the same shape and dtype on all ranks. The dtype is an
            integer of 8 to 64 bits, float16, bfloat16, float32, float64, complex64 or complex128.
        average: the deprecated form of ``op``; True is hvd.Average, False is hvd.Sum.
        device_dense: where a dense result is put, as in ``tf.device``.
        device_sparse: where a result that is tf.IndexedSlices is put.
        compression: one of hvd.Compression, or a class with ``compress`` and ``decompress``.
        op: hvd.Average, Sum, Min, Max, Product or Adasum; of complex tensors Average or Sum.
        prescale_factor: each element is multiplied by it before the reduction.
        postscale_factor: each element is multiplied by it after the reduction.
        name: tells concurrent operations apart. In eager execution, without a name, all ranks must make their calls in
            the same order. In a tf.function names are made of the tensors'.
        process_set: the ranks that take part.
        ignore_name_scope: whether a name in a tf.function goes without the name scope in front.

    Returns:
        A tensor of the same shape and dtype.

    Raises:
        TypeError, ValueError: for arguments that make no sense.
        NotImplementedError: for Adasum on a number of ranks that is no power of two or on IndexedSlices.
        HorovodInternalError: on every rank where ranks disagree.

    Examples:
        >>> hvd.allreduce(tf.constant([1.0, 2.0]) * (1 + hvd.rank())).numpy().tolist()
        [1.5, 3.0]
        >>> hvd.allreduce(tf.constant(hvd.rank()), op=hvd.Max).numpy().item()
        1
    """
    invocation = Invocation("allreduce", name, process_set, waits=True, ignore_name_scope=ignore_name_scope)
    reduce_op = checks.op_or_average(invocation.function, op, average)
    factors = (prescale_factor, postscale_factor)
    if isinstance(tensor, tf.IndexedSlices):
        with tf.device(device_sparse):
            return _allreduce_slices(invocation, [tensor], reduce_op, factors)[0]
    dense = tensor_checks.check_tensor(invocation.function, tensor, tensor_checks.REDUCIBLE_DTYPES)
    return _allreduce_dense(invocation, [dense], compression, reduce_op, factors, device_dense)[0]


@as_written
def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Any]:
    """Reduce several tensors over all ranks as one operation: none starts before all are ready on all ranks.

    The other arguments, gradients and errors are those of allreduce().

    Args:
        tensors: a list of what allreduce() takes. IndexedSlices among them are one operation of their own.

    Returns:
        A list of tensors; an empty list for an empty list.

    Examples:
        >>> [total.numpy().tolist() for total in hvd.grouped_allreduce([tf.ones(2), tf.constant(3)], op=hvd.Sum)]
        [[2.0, 2.0], 6]
    """
    invocation = Invocation("grouped_allreduce", name, process_set, waits=True, ignore_name_scope=ignore_name_scope)
    reduce_op = checks.op_or_average(invocation.function, op, average)
    if len(tensors) == 0:
        return []
    factors = (prescale_factor, postscale_factor)
    slices = [tensor for tensor in tensors if isinstance(tensor, tf.IndexedSlices)]
    dense = [tensor for tensor in tensors if not isinstance(tensor, tf.IndexedSlices)]
    if slices:
        with tf.device(device_sparse):
            slices = _allreduce_slices(invocation, slices, reduce_op, factors)
    if dense:
        dense = tensor_checks.check_tensors(invocation.function, dense, tensor_checks.REDUCIBLE_DTYPES)
        dense = _allreduce_dense(invocation, dense, compression, reduce_op, factors, device_dense)
    results = {True: iter(slices), False: iter(dense)}
    return [next(results[isinstance(tensor, tf.IndexedSlices)]) for tensor in tensors]
