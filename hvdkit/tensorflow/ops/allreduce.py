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
from hvdkit.engine.life import runtime
from hvdkit.engine.life.process_sets import ProcessSet, global_process_set
from hvdkit.engine.ops.requests import ReduceRequest
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
    if op == ReduceOp.ADASUM:
        dtypes = [tensor.dtype.name for tensor in tensors]
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

    ``tensor`` (tf.Tensor, tf.Variable or tf.IndexedSlices) has the same shape and type on all ranks. ``op`` is
    hvd.Average, Sum, Min, Max, Product or Adasum; ``average`` is its deprecated form. Each element is multiplied by
    ``prescale_factor`` before and ``postscale_factor`` after the reduction. ``name`` tells concurrent operations apart;
    in eager execution, without one, ranks must make their calls in the same order. In a tf.function names are made of
    the tensors', with the name scope in front unless ``ignore_name_scope``. Of IndexedSlices values and indices are
    gathered. Differentiable: the gradient is reduced in the same way. ``device_dense`` and ``device_sparse`` are where
    results are put, as in ``tf.device``. ``compression`` is one of hvd.Compression, or a class with ``compress`` and
    ``decompress``.

    Returns a tensor of the same shape and type. Raises TypeError or ValueError for arguments that make no sense,
    NotImplementedError for Adasum on a number of ranks that is no power of two or on IndexedSlices, and
    HorovodInternalError on every rank where ranks disagree.
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

    Arguments, gradients and errors are those of allreduce(). IndexedSlices among them are one operation of their own.
    Returns a list of tensors; an empty one for an empty list.
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
