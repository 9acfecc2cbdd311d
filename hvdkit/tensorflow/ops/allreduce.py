"""Allreduce: every rank gets the same reduction of all ranks' tensors."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import tensorflow as tf

from hvdkit.api import checks
from hvdkit.api.gradients import guard
from hvdkit.api.gradients.compression import around
from hvdkit.api.operations import Asked
from hvdkit.engine.ops.requests import ReduceRequest
from hvdkit.engine.session import runtime
from hvdkit.engine.session.process_sets import ProcessSet, global_process_set
from hvdkit.kernels.reduce_op import ReduceOp
from hvdkit.tensorflow.compression import Compression, split_compression
from hvdkit.tensorflow.ops import tensor_checks
from hvdkit.tensorflow.ops.reduction import reduce
from hvdkit.tensorflow.ops.sparse import allreduce_slices
from hvdkit.tensorflow.ops.unconverted import as_written


def _reduced(
    asked: Asked, tensors: Sequence[Any], compression: Any, op: ReduceOp, factors: tuple[Any, Any], device: str
) -> list[Any]:
    """The reductions of dense tensors, of dtypes that can be reduced, after all other checks."""
    codec, compressor = split_compression(asked.function, compression, op, tensors)
    tensor_checks.check_asked(asked)
    if op not in (ReduceOp.AVERAGE, ReduceOp.SUM):  # which are defined for all dtypes
        dtypes = [tensor.dtype.name for tensor in tensors]
        checks.check_op_for(asked.function, op, dtypes)
        if op == ReduceOp.ADASUM:
            checks.check_adasum(asked.function, dtypes, asked.process_set, runtime.topology().size)
    request = ReduceRequest(op, *checks.check_factors(asked.function, *factors), codec)
    with tf.device(device) if device else nullcontext():
        results = around(compressor, tensors, lambda sent: reduce(asked, sent, request))
    guard.mark(results)
    return results


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

    Differentiable: the gradient is reduced in the same way. Of IndexedSlices values and indices are gathered.

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
        name: tells concurrent operations apart; in eager execution, without one, ranks must make their calls in the
            same order. In a tf.function names are made of the tensors'.
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
    asked = Asked("allreduce", name, process_set, waits=True, ignore_name_scope=ignore_name_scope)
    reduce_op = checks.op_or_average(asked.function, op, average)
    factors = (prescale_factor, postscale_factor)
    if isinstance(tensor, tf.IndexedSlices):
        with tf.device(device_sparse):
            return allreduce_slices(asked, [tensor], reduce_op, factors)[0]
    dense = tensor_checks.check_tensor(asked.function, tensor, tensor_checks.REDUCIBLE_DTYPES)
    return _reduced(asked, [dense], compression, reduce_op, factors, device_dense)[0]


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
        A list of tensors; an empty one for an empty list.

    Examples:
        >>> [one.numpy().tolist() for one in hvd.grouped_allreduce([tf.ones(2), tf.constant(3)], op=hvd.Sum)]
        [[2.0, 2.0], 6]
    """
    asked = Asked("grouped_allreduce", name, process_set, waits=True, ignore_name_scope=ignore_name_scope)
    reduce_op = checks.op_or_average(asked.function, op, average)
    if len(tensors) == 0:
        return []
    factors = (prescale_factor, postscale_factor)
    slices = [one for one in tensors if isinstance(one, tf.IndexedSlices)]
    dense = [one for one in tensors if not isinstance(one, tf.IndexedSlices)]
    if slices:
        with tf.device(device_sparse):
            slices = allreduce_slices(asked, slices, reduce_op, factors)
    if dense:
        dense = tensor_checks.check_tensors(asked.function, dense, tensor_checks.REDUCIBLE_DTYPES)
        dense = _reduced(asked, dense, compression, reduce_op, factors, device_dense)
    results = {True: iter(slices), False: iter(dense)}
    return [next(results[isinstance(one, tf.IndexedSlices)]) for one in tensors]
