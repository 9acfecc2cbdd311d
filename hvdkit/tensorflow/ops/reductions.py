"""Allreduce: every rank gets the reduction of all ranks' tensors; reduce-scatter: each rank gets some of its rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import tensorflow as tf

from hvdkit.api import checks
from hvdkit.api.gradients import guard
from hvdkit.api.gradients.compression import around, split
from hvdkit.api.operations import Invocation, gradient_name
from hvdkit.engine.ops.requests import ReduceRequest
from hvdkit.engine.session import runtime
from hvdkit.engine.session.process_sets import ProcessSet, global_process_set
from hvdkit.kernels.reduce_op import ReduceOp
from hvdkit.tensorflow.compression import Compression
from hvdkit.tensorflow.ops import framework
from hvdkit.tensorflow.ops.bridge import allreduce_dense, as_written, differentiable, has_gradient, run, scalar
from hvdkit.tensorflow.ops.transfers import any_rows, grouped_allgather

Factors = tuple[Any, Any]  # before and after the reduction

# The reductions that are defined for all dtypes, for slices, and by rows.
_LINEAR = (ReduceOp.AVERAGE, ReduceOp.SUM)


def _reduced(
    invocation: Invocation,
    tensors: Sequence[Any],
    compression: Any,
    op: ReduceOp,
    factors: Factors,
    device: str,
    reduce: Callable[[Invocation, Sequence[Any], ReduceRequest], list[Any]],
) -> list[Any]:
    """Return what ``reduce`` makes of compressed tensors, decompressed. Raise TypeError or ValueError for arguments."""
    checks.check_op_for(invocation.function, op, [tensor.dtype.name for tensor in tensors])
    floating = {tensor.dtype.name: has_gradient(tensor) for tensor in tensors}
    codec, compressor = split(invocation.function, compression, op, floating)
    request = ReduceRequest(op, *checks.check_factors(invocation.function, *factors), codec)
    with tf.device(device) if device else nullcontext():
        results = around(compressor, tensors, lambda sent: reduce(invocation, sent, request))
    guard.mark(results)
    return results


def _allreduce_slices(
    invocation: Invocation, slices: Sequence[Any], op: ReduceOp, factors: Factors, device: str
) -> list[Any]:
    """Gather all ranks' slices, which together are the sum. An index that several ranks have stands several times.

    Raise NotImplementedError for other operations than Sum and Average and for scale factors.
    """
    function, name, process_set = invocation.function, invocation.name, invocation.process_set
    if op not in _LINEAR:
        raise NotImplementedError(
            f"{function}: hvd.{op.name.capitalize()} is not supported for tf.IndexedSlices, only Sum and Average.\n"
            "HINT: use sparse_as_dense=True, or tf.convert_to_tensor()."
        )
    if factors != (1.0, 1.0):
        raise NotImplementedError(
            f"{function}: prescale_factor and postscale_factor are not supported for tf.IndexedSlices"
        )
    with tf.device(device):
        parts = [part for tensor in slices for part in (tensor.values, tensor.indices)]
        gathered = grouped_allgather(parts, name, invocation.ignore_name_scope, process_set)
        divisor = size_in_graph(process_set) if op == ReduceOp.AVERAGE else 1
        return [
            tf.IndexedSlices(quotient(values, divisor), indices, dense_shape=tensor.dense_shape)
            for tensor, values, indices in zip(slices, gathered[::2], gathered[1::2], strict=True)
        ]


def size_in_graph(process_set: ProcessSet) -> Any:
    """Return the number of ranks: of each run, as a tensor, in a graph that runs with any number of ranks."""
    if process_set is global_process_set and not tf.executing_eagerly() and runtime.is_elastic():
        return scalar(lambda: runtime.topology().size)
    return checks.size_of(process_set)


def quotient(values: Any, divisor: Any) -> Any:
    """Return ``values / divisor`` in the dtype of ``values``. Integers are divided exactly and cut off."""
    if isinstance(divisor, int) and divisor == 1:
        return values
    if values.dtype.is_complex:  # whose division in TensorFlow rounds more than once
        divisor = tf.cast(divisor, values.dtype.real_dtype)
        return tf.complex(tf.math.real(values) / divisor, tf.math.imag(values) / divisor)
    if not values.dtype.is_integer:
        return values / tf.cast(divisor, values.dtype)
    # TensorFlow divides integers as float64, which has 53 bits; and a narrow type may not hold the number of ranks.
    wide = tf.uint64 if values.dtype == tf.uint64 else tf.int64
    return tf.cast(tf.truncatediv(tf.cast(values, wide), tf.cast(divisor, wide)), values.dtype)


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
        return _allreduce_slices(invocation, [tensor], reduce_op, factors, device_sparse)[0]
    dense = framework.check_tensor(invocation.function, tensor, framework.REDUCIBLE_DTYPES)
    return _reduced(invocation, [dense], compression, reduce_op, factors, device_dense, allreduce_dense)[0]


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

    The other arguments, gradients and errors are those of allreduce(). Returns a list of tensors.

    Args:
        tensors: a list of what allreduce() takes. IndexedSlices among them are one operation of their own.

    Examples:
        >>> [total.numpy().tolist() for total in hvd.grouped_allreduce([tf.ones(2), tf.constant(3)], op=hvd.Sum)]
        [[2.0, 2.0], 6]
    """
    invocation = Invocation("grouped_allreduce", name, process_set, waits=True, ignore_name_scope=ignore_name_scope)
    reduce_op = checks.op_or_average(invocation.function, op, average)
    factors = (prescale_factor, postscale_factor)
    tensors = list(tensors)  # an iterator gives them once
    slices = [tensor for tensor in tensors if isinstance(tensor, tf.IndexedSlices)]
    dense = [tensor for tensor in tensors if not isinstance(tensor, tf.IndexedSlices)]
    if slices:
        slices = _allreduce_slices(invocation, slices, reduce_op, factors, device_sparse)
    if dense:
        dense = framework.check_tensors(invocation.function, dense, framework.REDUCIBLE_DTYPES)
        dense = _reduced(invocation, dense, compression, reduce_op, factors, device_dense, allreduce_dense)
    next_slices, next_dense = iter(slices), iter(dense)
    return [next(next_slices if isinstance(tensor, tf.IndexedSlices) else next_dense) for tensor in tensors]


def _scatter(invocation: Invocation, tensors: Sequence[Any], request: ReduceRequest) -> list[Any]:
    """Return this rank's rows. Gradients are gathered and scaled as the tensors are."""

    def start(invocation: Invocation, arrays: Sequence[Any]) -> int:
        return framework.OPERATIONS.reducescatter(invocation, arrays, request)

    def all_rows(_: Sequence[Any], gradients: list[Any]) -> list[Any]:
        # As in Horovod, the gradient of an average is not divided; that of a sum is multiplied by the number of ranks.
        times = size_in_graph(invocation.process_set) if request.op == ReduceOp.SUM else 1
        name = gradient_name(invocation.name)
        gathered = grouped_allgather(gradients, name, invocation.ignore_name_scope, invocation.process_set)
        for factor in (times, request.prescale, request.postscale):
            if not isinstance(factor, (int, float)) or factor != 1:
                gathered = [gradient * tf.cast(factor, gradient.dtype) for gradient in gathered]
        return gathered

    outputs = [(tensor.dtype, any_rows(tensor)) for tensor in tensors]
    return differentiable(tensors, lambda inputs: run(invocation, inputs, start, outputs), all_rows)


@as_written
def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: Any = Compression.none,
    op: int = ReduceOp.AVERAGE,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Reduce a tensor over all ranks of ``process_set``, and give each rank some rows of the result, in rank order.

    The first ranks get one row more where rows cannot be shared evenly. The other arguments and the errors are those of
    allreduce(). Differentiable. Returns a tensor with this rank's rows.

    Args:
        tensor: has at least one dimension and the same shape and dtype on all ranks.
        op: hvd.Average or hvd.Sum.

    Examples:
        >>> hvd.reducescatter(tf.range(3.0), op=hvd.Sum).numpy().tolist()  # on rank 1: [4.0]
        [0.0, 2.0]
    """
    invocation = Invocation("reducescatter", name, process_set, waits=True, ignore_name_scope=ignore_name_scope)
    reduce_op = checks.check_op(invocation.function, op, _LINEAR)
    dense = [framework.check_tensor(invocation.function, tensor, framework.REDUCIBLE_DTYPES)]
    factors = (prescale_factor, postscale_factor)
    return _reduced(invocation, dense, compression, reduce_op, factors, device_dense, _scatter)[0]


@as_written
def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: Any = Compression.none,
    op: int = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Any]:
    """Reduce-scatter several tensors as one operation. Arguments, gradients and errors are those of reducescatter().

    Returns a list of tensors with this rank's rows, for the list ``tensors``.

    Examples:
        >>> [rows.numpy().tolist() for rows in hvd.grouped_reducescatter([tf.ones(4), tf.ones(2)], op=hvd.Sum)]
        [[2.0, 2.0], [2.0]]
    """
    invocation = Invocation("grouped_reducescatter", None, process_set, waits=True)
    reduce_op = checks.check_op(invocation.function, op, _LINEAR)
    dense = framework.check_tensors(invocation.function, tensors, framework.REDUCIBLE_DTYPES)
    factors = (prescale_factor, postscale_factor)
    return _reduced(invocation, dense, compression, reduce_op, factors, device_dense, _scatter) if dense else []
