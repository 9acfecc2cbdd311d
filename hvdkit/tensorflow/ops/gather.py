"""Allgather and alltoall: rows of all ranks, one after the other, and rows for each rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvdkit.api.operations import Asked
from hvdkit.engine.ops.requests import ReduceRequest
from hvdkit.engine.session.process_sets import ProcessSet, global_process_set
from hvdkit.kernels.reduce_op import ReduceOp
from hvdkit.tensorflow.ops import tensor_checks
from hvdkit.tensorflow.ops.arrays import as_array
from hvdkit.tensorflow.ops.bridge import differentiable, has_gradient, run
from hvdkit.tensorflow.ops.framework import OPERATIONS
from hvdkit.tensorflow.ops.ranks import process_set_rank
from hvdkit.tensorflow.ops.reduction import reduce
from hvdkit.tensorflow.ops.unconverted import as_written


def any_rows(tensor: Any) -> Any:
    """The shape of a result, as far as a graph knows it."""
    return tf.TensorShape([None, *tensor.shape[1:]]) if tensor.shape.rank is not None else tensor.shape


def _gather(asked: Asked, tensors: Sequence[Any]) -> list[Any]:
    """Differentiable: the gradient is this rank's rows of the gradients' average, as Horovod's."""
    tensor_checks.check_has_rows(asked.function, tensors)
    tensor_checks.check_asked(asked)

    def gather(inputs: Sequence[Any]) -> list[Any]:
        return run(
            asked,
            inputs,
            OPERATIONS.allgather,
            [(tensor.dtype, any_rows(tensor)) for tensor in inputs],
            stays_on_device=lambda: True,
        )

    def own_rows(inputs: Sequence[Any], gradients: list[Any]) -> list[Any]:
        of_all = asked.of_gradient()._replace(function="grouped_allreduce")
        averages = reduce(of_all, gradients, ReduceRequest(ReduceOp.AVERAGE))
        rows = tf.stack([tf.shape(tensor)[0] for tensor in inputs if has_gradient(tensor)])
        rows_name = None if asked.name is None else f"{asked.name}.rows"
        (all_rows,) = _gather(asked._replace(function="allgather", name=rows_name), [rows[tf.newaxis]])
        before = tf.reduce_sum(all_rows[: process_set_rank(asked.process_set)], axis=0)
        return [average[before[i] : before[i] + rows[i]] for i, average in enumerate(averages)]

    return differentiable(tensors, gather, own_rows)


@as_written
def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Concatenate the tensors of all ranks of ``process_set``, in rank order, along the first dimension.

    ``name`` and ``ignore_name_scope`` are those of allreduce(). Differentiable: the gradient is this rank's rows of the
    average of all ranks' gradients.

    Args:
        tensor: has at least one dimension; its dtype (one of allreduce()'s, or bool) and all of its shape but the first
            dimension are the same on all ranks.
        process_set: the ranks that take part.

    Returns:
        A tensor with the sum of all ranks' rows.

    Raises:
        TypeError, ValueError: for arguments that make no sense.
        HorovodInternalError: on every rank where ranks disagree.

    Examples:
        >>> hvd.allgather(tf.fill([1 + hvd.rank(), 2], hvd.rank())).numpy().tolist()
        [[0, 0], [1, 1], [1, 1]]
    """
    asked = Asked("allgather", name, process_set, waits=True, ignore_name_scope=ignore_name_scope)
    return _gather(asked, [tensor_checks.check_tensor(asked.function, tensor, tensor_checks.MOVABLE_DTYPES)])[0]


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
        A list of tensors; an empty one for an empty list.

    Examples:
        >>> [one.numpy().tolist() for one in hvd.grouped_allgather([tf.constant([hvd.rank()]), tf.ones(1)])]
        [[0, 1], [1.0, 1.0]]
    """
    asked = Asked("grouped_allgather", name, process_set, waits=True, ignore_name_scope=ignore_name_scope)
    found = tensor_checks.check_tensors(asked.function, tensors, tensor_checks.MOVABLE_DTYPES)
    return _gather(asked, found) if found else []


def _scatter(asked: Asked, tensor: Any, splits: Any, problem: Exception | None = None) -> tuple[Any, Any]:
    """The rows received, and how many came from each rank. Differentiable: rows' gradients go back where they were.

    ``problem``: why ``splits``, which are None then, cannot be told. It is raised when the operation runs, not while a
    graph is traced: the other ranks wait for it there.
    """

    def start(asked: Asked, inputs: Sequence[Any]) -> int:
        def own_splits() -> Any:
            if problem is not None:
                raise problem
            return as_array(inputs[1]) if len(inputs) > 1 else None

        return OPERATIONS.alltoall(asked, inputs[0], own_splits)

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def scatter(rows: Any) -> tuple[Any, Callable[..., Any]]:
        inputs = [rows] if splits is None else [rows, splits]
        dtype = tf.int32 if splits is None else splits.dtype
        known = [(rows.dtype, any_rows(rows)), (dtype, tf.TensorShape([asked.process_set.size()]))]
        output, received = run(asked, inputs, start, known, named_after=[rows])

        def gradient(of_output: Any, _: Any) -> Any:
            if not has_gradient(output):
                return None
            known = tf.zeros_like(output) if of_output is None else tf.convert_to_tensor(of_output)
            back, _ = _scatter(asked.of_gradient(), known, received)
            unsent = tf.shape(rows)[0] - tf.shape(back)[0]  # rows that were not sent to anybody
            return tf.concat([back, tf.zeros(tf.concat([[unsent], tf.shape(back)[1:]], 0), back.dtype)], 0)

        return (output, received), gradient

    output, received = scatter(tensor)
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

    ``name`` and ``ignore_name_scope`` are those of allreduce(). Differentiable: gradients go back to where rows came
    from.

    Args:
        tensor: has at least one dimension; its dtype (one of allreduce()'s, or bool) and all of its shape but the first
            dimension are the same on all ranks.
        splits: one integer for each rank, in sum at most the rows of ``tensor``; without it each rank gets an equal
            share.
        process_set: the ranks that take part.

    Returns:
        A tensor with the rows received, in rank order, and if ``splits`` was given also a tensor that says how many
        came from each rank.

    Raises:
        TypeError, ValueError: for arguments that make no sense.
        HorovodInternalError: on every rank where ranks disagree.

    Examples:
        >>> hvd.alltoall(tf.constant([10, 11]) + 10 * hvd.rank()).numpy().tolist()  # on rank 1: [11, 21]
        [10, 20]
        >>> rows, received = hvd.alltoall(tf.range(3), splits=[1, 2])  # one row to rank 0, two to rank 1
        >>> received.numpy().tolist()  # on rank 1: [2, 2]
        [1, 1]
    """
    asked = Asked("alltoall", name, process_set, waits=True, ignore_name_scope=ignore_name_scope)
    found = tensor_checks.check_tensor(asked.function, tensor, tensor_checks.MOVABLE_DTYPES)
    tensor_checks.check_has_rows(asked.function, [found])
    tensor_checks.check_asked(asked)
    wanted, problem = None, None
    try:
        wanted = None if splits is None else tensor_checks.check_integers(asked.function, "splits", splits)
    except (TypeError, ValueError) as error:
        problem = error
    output, received = _scatter(asked, found, wanted, problem)
    return output if splits is None else (output, received)
