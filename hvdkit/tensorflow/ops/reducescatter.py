"""Reduce-scatter: the reduction of all ranks' tensors, of which each rank gets some rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdkit.api import checks
from hvdkit.api.gradients.compression import around
from hvdkit.api.operations import Asked, gradient_name
from hvdkit.engine.ops.requests import ReduceRequest
from hvdkit.engine.session.process_sets import ProcessSet, global_process_set
from hvdkit.kernels.reduce_op import ReduceOp
from hvdkit.tensorflow.compression import Compression, split_compression
from hvdkit.tensorflow.ops import tensor_checks
from hvdkit.tensorflow.ops.bridge import differentiable, run
from hvdkit.tensorflow.ops.framework import OPERATIONS
from hvdkit.tensorflow.ops.gather import any_rows, grouped_allgather
from hvdkit.tensorflow.ops.unconverted import as_written

_OPS = (ReduceOp.AVERAGE, ReduceOp.SUM)


def _scatter(asked: Asked, tensors: Sequence[Any], request: ReduceRequest) -> list[Any]:
    """Differentiable: the gradients are gathered and scaled as the tensors are."""
    tensor_checks.check_has_rows(asked.function, tensors)
    tensor_checks.check_asked(asked)

    def scatter(inputs: Sequence[Any]) -> list[Any]:
        return run(
            asked,
            inputs,
            lambda asked, some: OPERATIONS.reducescatter(asked, some, request),
            [(tensor.dtype, any_rows(tensor)) for tensor in inputs],
        )

    def all_rows(_: Sequence[Any], gradients: list[Any]) -> list[Any]:
        # As Horovod's: an average's gradient is not divided, a sum's is multiplied by the number of ranks.
        times = checks.size_of(asked.process_set) if request.op == ReduceOp.SUM else 1
        gathered = grouped_allgather(gradients, gradient_name(asked.name), asked.ignore_name_scope, asked.process_set)
        for factor in (times, request.prescale, request.postscale):
            if factor != 1:
                gathered = [gradient * tf.cast(factor, gradient.dtype) for gradient in gathered]
        return gathered

    return differentiable(tensors, scatter, all_rows)


def _reduced(
    asked: Asked, tensors: Sequence[Any], device: str, compression: Any, op: ReduceOp, factors: tuple[Any, Any]
) -> list[Any]:
    """This rank's rows of the reductions of tensors, of dtypes that can be reduced."""
    codec, compressor = split_compression(asked.function, compression, op, tensors)
    request = ReduceRequest(op, *checks.check_factors(asked.function, *factors), codec)
    with tf.device(device):
        return around(compressor, tensors, lambda sent: _scatter(asked, sent, request))


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
    allreduce(). Differentiable.

    Args:
        tensor: has at least one dimension and the same shape and dtype on all ranks.
        op: hvd.Average or hvd.Sum.

    Returns:
        A tensor with this rank's rows.

    Examples:
        >>> hvd.reducescatter(tf.range(3.0), op=hvd.Sum).numpy().tolist()  # on rank 1: [4.0]
        [0.0, 2.0]
    """
    asked = Asked("reducescatter", name, process_set, waits=True, ignore_name_scope=ignore_name_scope)
    reduce_op = checks.check_op(asked.function, op, _OPS)
    found = tensor_checks.check_tensor(asked.function, tensor, tensor_checks.REDUCIBLE_DTYPES)
    return _reduced(asked, [found], device_dense, compression, reduce_op, (prescale_factor, postscale_factor))[0]


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

    Args:
        tensors: a list of tensors, each as in reducescatter().

    Returns:
        A list of tensors with this rank's rows; an empty one for an empty list.

    Examples:
        >>> [one.numpy().tolist() for one in hvd.grouped_reducescatter([tf.ones(4), tf.ones(2)], op=hvd.Sum)]
        [[2.0, 2.0], [2.0]]
    """
    asked = Asked("grouped_reducescatter", None, process_set, waits=True)
    reduce_op = checks.check_op(asked.function, op, _OPS)
    if len(tensors) == 0:
        return []
    found = tensor_checks.check_tensors(asked.function, tensors, tensor_checks.REDUCIBLE_DTYPES)
    return _reduced(asked, found, device_dense, compression, reduce_op, (prescale_factor, postscale_factor))
