"""Reduce-scatter: each rank gets some rows of the reduction of all ranks' tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdkit.api import checks
from hvdkit.api.operations import Invocation, gradient_name
from hvdkit.engine.ops.requests import ReduceRequest
from hvdkit.engine.session.process_sets import ProcessSet, global_process_set
from hvdkit.kernels.reduce_op import ReduceOp
from hvdkit.tensorflow.compression import Compression
from hvdkit.tensorflow.ops import tensor_checks
from hvdkit.tensorflow.ops.bridge import as_written, differentiable, run
from hvdkit.tensorflow.ops.framework import OPERATIONS
from hvdkit.tensorflow.ops.gather import any_rows, grouped_allgather
from hvdkit.tensorflow.ops.reduction import compressed

_OPS = (ReduceOp.AVERAGE, ReduceOp.SUM)


def _scatter(invocation: Invocation, tensors: Sequence[Any], request: ReduceRequest) -> list[Any]:
    """Return this rank's rows. Gradients are gathered and scaled as the tensors are."""
    tensor_checks.check_has_rows(invocation.function, tensors)
    tensor_checks.check_arguments(invocation)

    def scatter(inputs: Sequence[Any]) -> list[Any]:
        return run(
            invocation,
            inputs,
            lambda invocation, arrays: OPERATIONS.reducescatter(invocation, arrays, request),
            [(tensor.dtype, any_rows(tensor)) for tensor in inputs],
        )

    def all_rows(_: Sequence[Any], gradients: list[Any]) -> list[Any]:
        # As in Horovod, the gradient of an average is not divided; that of a sum is multiplied by the number of ranks.
        times = checks.size_of(invocation.process_set) if request.op == ReduceOp.SUM else 1
        name = gradient_name(invocation.name)
        gathered = grouped_allgather(gradients, name, invocation.ignore_name_scope, invocation.process_set)
        for factor in (times, request.prescale, request.postscale):
            if factor != 1:
                gathered = [gradient * tf.cast(factor, gradient.dtype) for gradient in gathered]
        return gathered

    return differentiable(tensors, scatter, all_rows)


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
    invocation = Invocation("reducescatter", name, process_set, waits=True, ignore_name_scope=ignore_name_scope)
    reduce_op = checks.check_op(invocation.function, op, _OPS)
    dense = tensor_checks.check_tensor(invocation.function, tensor, tensor_checks.REDUCIBLE_DTYPES)
    factors = (prescale_factor, postscale_factor)
    return compressed(invocation, [dense], compression, reduce_op, factors, device_dense, _scatter)[0]


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
        A list of tensors with this rank's rows; an empty list for an empty list.

    Examples:
        >>> [rows.numpy().tolist() for rows in hvd.grouped_reducescatter([tf.ones(4), tf.ones(2)], op=hvd.Sum)]
        [[2.0, 2.0], [2.0]]
    """
    invocation = Invocation("grouped_reducescatter", None, process_set, waits=True)
    reduce_op = checks.check_op(invocation.function, op, _OPS)
    if len(tensors) == 0:
        return []
    dense = tensor_checks.check_tensors(invocation.function, tensors, tensor_checks.REDUCIBLE_DTYPES)
    factors = (prescale_factor, postscale_factor)
    return compressed(invocation, dense, compression, reduce_op, factors, device_dense, _scatter)
