"""Allgather and alltoall: rows of all ranks, one after the other, and rows for each rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvdkit.api.operations import Invocation
from hvdkit.engine.ops.requests import ReduceRequest
from hvdkit.engine.session.process_sets import ProcessSet, global_process_set
from hvdkit.kernels.reduce_op import ReduceOp
from hvdkit.tensorflow.ops import tensor_checks
from hvdkit.tensorflow.ops.bridge import as_written, differentiable, has_gradient, run
from hvdkit.tensorflow.ops.framework import OPERATIONS, as_array
from hvdkit.tensorflow.ops.ranks import process_set_rank
from hvdkit.tensorflow.ops.reduction import allreduce_dense


def any_rows(tensor: Any) -> Any:
    """Return the static shape of a tensor, with any number of rows."""
    return tf.TensorShape([None, *tensor.shape[1:]]) if tensor.shape.rank is not None else tensor.shape


def _gather(invocation: Invocation, tensors: Sequence[Any]) -> list[Any]:
    """Return all ranks' rows. The gradient is this rank's rows of the gradients' average, as in Horovod."""
    tensor_checks.check_has_rows(invocation.function, tensors)
    tensor_checks.check_arguments(invocation)

    def gather(inputs: Sequence[Any]) -> list[Any]:
        return run(invocation, inputs, OPERATIONS.allgather, [(tensor.dtype, any_rows(tensor)) for tensor in inputs])

    def own_rows(inputs: Sequence[Any], gradients: list[Any]) -> list[Any]:
        average_all = invocation.of_gradient()._replace(function="grouped_allreduce")
        averages = allreduce_dense(average_all, gradients, ReduceRequest(ReduceOp.AVERAGE))
        rows = tf.stack([tf.shape(tensor)[0] for tensor in inputs if has_gradient(tensor)])
        rows_name = None if invocation.name is None else f"{invocation.name}.rows"
        (all_rows,) = _gather(invocation._replace(function="allgather", name=rows_name), [rows[tf.newaxis]])
        begins = tf.reduce_sum(all_rows[: process_set_rank(invocation.process_set)], axis=0)
        return [average[begins[i] : begins[i] + rows[i]] for i, average in enumerate(averages)]

    return differentiable(tensors, gather, own_rows)


@as_written
def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Concatenate the tensors of all ranks of ``process_set``, in rank order, along the first dimension.

    The other arguments and the errors are those of allreduce(). Differentiable: the gradient is this rank's rows of the
    average of all ranks' gradients.

    Args:
        tensor: has at least one dimension. Its dtype (one of allreduce()'s, or bool) and all of its shape but the first
            dimension are the same on all ranks.

    Returns:
        A tensor with the sum of all ranks' rows.

    Examples:
        >>> hvd.allgather(tf.fill([1 + hvd.rank(), 2], hvd.rank())).numpy().tolist()
        [[0, 0], [1, 1], [1, 1]]
    """
    invocation = Invocation("allgather", name, process_set, waits=True, ignore_name_scope=ignore_name_scope)
    dense = tensor_checks.check_tensor(invocation.function, tensor, tensor_checks.MOVABLE_DTYPES)
    return _gather(invocation, [dense])[0]


@as_written
def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Allgather several tensors as one operation. Arguments, gradients and errors are those of allgather().

    Args:
        tensors: a list of tensors, each as in allgather().

    Returns:
        A list of tensors; an empty list for an empty list.

    Examples:
        >>> [rows.numpy().tolist() for rows in hvd.grouped_allgather([tf.constant([hvd.rank()]), tf.ones(1)])]
        [[0, 1], [1.0, 1.0]]
    """
    invocation = Invocation("grouped_allgather", name, process_set, waits=True, ignore_name_scope=ignore_name_scope)
    dense = tensor_checks.check_tensors(invocation.function, tensors, tensor_checks.MOVABLE_DTYPES)
    return _gather(invocation, dense) if dense else []


def _exchange(invocation: Invocation, tensor: Any, splits: Any, problem: Exception | None = None) -> tuple[Any, Any]:
    """Return the received rows and their number by rank. The gradients of rows go back to the senders.

    ``problem``: the error of wrong ``splits``, which are None then. It is raised when the operation runs, not while a
    graph is traced, since the other ranks wait for this rank until they learn of the error.
    """

    def start(invocation: Invocation, inputs: Sequence[Any]) -> int:
        def own_splits() -> Any:
            if problem is not None:
                raise problem
            return as_array(inputs[1]) if len(inputs) > 1 else None

        return OPERATIONS.alltoall(invocation, inputs[0], own_splits)

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def exchange(rows: Any) -> tuple[Any, Callable[..., Any]]:
        inputs = [rows] if splits is None else [rows, splits]
        dtype = tf.int32 if splits is None else splits.dtype
        outputs = [(rows.dtype, any_rows(rows)), (dtype, tf.TensorShape([invocation.process_set.size()]))]
        output, received = run(invocation, inputs, start, outputs, named_after=[rows])

        def backward(upstream: Any, _: Any) -> Any:
            if not has_gradient(output):
                return None
            gradient = tf.zeros_like(output) if upstream is None else tf.convert_to_tensor(upstream)
            returned, _ = _exchange(invocation.of_gradient(), gradient, received)
            unsent = tf.shape(rows)[0] - tf.shape(returned)[0]  # rows that no rank was sent
            zeros = tf.zeros(tf.concat([[unsent], tf.shape(returned)[1:]], 0), returned.dtype)
            return tf.concat([returned, zeros], 0)

        return (output, received), backward

    output, received = exchange(tensor)
    return output, received


@as_written
def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send the first ``splits[0]`` rows of ``tensor`` to the first rank of ``process_set``, the next to the second, ...

    The other arguments and the errors are those of allreduce(). Differentiable: gradients go back to the ranks that
    sent the rows.

    Args:
        tensor: has at least one dimension. Its dtype (one of allreduce()'s, or bool) and all of its shape but the first
            dimension are the same on all ranks.
        splits: one integer for each rank, in sum at most the rows of ``tensor``; without it each rank gets an equal
            share.

    Returns:
        A tensor with the received rows, in rank order, and if ``splits`` was given also a tensor with their number by
        rank.

    Examples:
        >>> hvd.alltoall(tf.constant([10, 11]) + 10 * hvd.rank()).numpy().tolist()  # on rank 1: [11, 21]
        [10, 20]
        >>> rows, received = hvd.alltoall(tf.range(3), splits=[1, 2])  # one row to rank 0, two to rank 1
        >>> received.numpy().tolist()  # on rank 1: [2, 2]
        [1, 1]
    """
    invocation = Invocation("alltoall", name, process_set, waits=True, ignore_name_scope=ignore_name_scope)
    dense = tensor_checks.check_tensor(invocation.function, tensor, tensor_checks.MOVABLE_DTYPES)
    tensor_checks.check_has_rows(invocation.function, [dense])
    tensor_checks.check_arguments(invocation)
    integers, problem = None, None
    try:
        integers = None if splits is None else tensor_checks.check_integers(invocation.function, "splits", splits)
    except (TypeError, ValueError) as error:
        problem = error
    output, received = _exchange(invocation, dense, integers, problem)
    return output if splits is None else (output, received)
