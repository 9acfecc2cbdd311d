"""Allgather, alltoall and broadcast: rows of all ranks, one after the other, rows for each rank, the root's tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvdkit.api import checks
from hvdkit.api.operations import Invocation
from hvdkit.engine.ops.requests import ReduceRequest
from hvdkit.engine.session import runtime
from hvdkit.engine.session.process_sets import ProcessSet, global_process_set
from hvdkit.kernels.reduce_op import ReduceOp
from hvdkit.tensorflow.ops import framework
from hvdkit.tensorflow.ops.bridge import allreduce_dense, as_written, differentiable, has_gradient, run, scalar

# The most bytes of variables that are broadcast together. A model with its optimizer's state can be far larger, and
# all that travels together is in memory twice.
CHUNK_BYTES = 256 << 20


def any_rows(tensor: Any) -> Any:
    """Return the static shape of a tensor, with any number of rows."""
    return tf.TensorShape([None, *tensor.shape[1:]]) if tensor.shape.rank is not None else tensor.shape


def _gather(invocation: Invocation, tensors: Sequence[Any]) -> list[Any]:
    """Return all ranks' rows. The gradient is this rank's rows of the gradients' average, as in Horovod."""

    def gather(inputs: Sequence[Any]) -> list[Any]:
        outputs = [(tensor.dtype, any_rows(tensor)) for tensor in inputs]
        return run(invocation, inputs, framework.OPERATIONS.allgather, outputs)

    def own_rows(inputs: Sequence[Any], gradients: list[Any]) -> list[Any]:
        average_all = invocation.of_gradient()._replace(function="grouped_allreduce")
        averages = allreduce_dense(average_all, gradients, ReduceRequest(ReduceOp.AVERAGE))
        rows = tf.stack([tf.shape(tensor)[0] for tensor in inputs if has_gradient(tensor)])
        rows_name = None if invocation.name is None else f"{invocation.name}.rows"
        (all_rows,) = _gather(invocation._replace(function="allgather", name=rows_name), [rows[tf.newaxis]])
        place = scalar(lambda: int(invocation.process_set.rank() or 0))
        begins = tf.reduce_sum(all_rows[:place], axis=0)
        return [average[begins[i] : begins[i] + rows[i]] for i, average in enumerate(averages)]

    return differentiable(tensors, gather, own_rows)


@as_written
def allgather(
    tensor: Any, name: str | None = None, ignore_name_scope: bool = False, process_set: ProcessSet = global_process_set
) -> Any:
    """Concatenate the tensors of all ranks of ``process_set``, in rank order, along the first dimension.

    The other arguments and the errors are those of allreduce(). Differentiable: the gradient is this rank's rows of the
    average of all ranks' gradients. Returns a tensor with the sum of all ranks' rows.

    Args:
        tensor: has at least one dimension. Its dtype (one of allreduce()'s, or bool) and all of its shape but the first
            dimension are the same on all ranks.

    Examples:
        >>> hvd.allgather(tf.fill([1 + hvd.rank(), 2], hvd.rank())).numpy().tolist()
        [[0, 0], [1, 1], [1, 1]]
    """
    invocation = Invocation("allgather", name, process_set, waits=True, ignore_name_scope=ignore_name_scope)
    dense = framework.check_tensor(invocation.function, tensor, framework.MOVABLE_DTYPES)
    return _gather(invocation, [dense])[0]


@as_written
def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Allgather several tensors as one operation. Arguments, gradients and errors are those of allgather().

    Returns a list of tensors for the list ``tensors``.

    Examples:
        >>> [rows.numpy().tolist() for rows in hvd.grouped_allgather([tf.constant([hvd.rank()]), tf.ones(1)])]
        [[0, 1], [1.0, 1.0]]
    """
    invocation = Invocation("grouped_allgather", name, process_set, waits=True, ignore_name_scope=ignore_name_scope)
    dense = framework.check_tensors(invocation.function, tensors, framework.MOVABLE_DTYPES)
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
            return framework.as_array(inputs[1]) if len(inputs) > 1 else None

        return framework.OPERATIONS.alltoall(invocation, inputs[0], own_splits)

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def exchange(rows: Any) -> tuple[Any, Callable[..., Any]]:
        inputs = [rows] if splits is None else [rows, splits]
        dtype = tf.int32 if splits is None else splits.dtype
        ranks = None if runtime.is_elastic() else invocation.process_set.size()
        outputs = [(rows.dtype, any_rows(rows)), (dtype, tf.TensorShape([ranks]))]
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

    The other arguments and the errors are those of allgather(). Differentiable: gradients go back to the ranks that
    sent the rows. Returns a tensor with the received rows, in rank order, and if ``splits`` was given also a tensor
    with their number by rank.

    Args:
        splits: one integer for each rank, in sum at most the rows of ``tensor``; without it each rank gets an equal
            share.

    Examples:
        >>> hvd.alltoall(tf.constant([10, 11]) + 10 * hvd.rank()).numpy().tolist()  # on rank 1: [11, 21]
        [10, 20]
        >>> rows, received = hvd.alltoall(tf.range(3), splits=[1, 2])  # one row to rank 0, two to rank 1
        >>> received.numpy().tolist()  # on rank 1: [2, 2]
        [1, 1]
    """
    invocation = Invocation("alltoall", name, process_set, waits=True, ignore_name_scope=ignore_name_scope)
    dense = framework.check_tensor(invocation.function, tensor, framework.MOVABLE_DTYPES)
    checks.check_registered(invocation.function, process_set)
    integers: Any = None
    problem: Exception | None = None
    if splits is not None:
        try:
            integers = _integers(splits)
        except (TypeError, ValueError) as error:
            problem = error
    output, received = _exchange(invocation, dense, integers, problem)
    return output if splits is None else (output, received)


def _integers(splits: Any) -> Any:
    """Return splits as a tensor. Raise TypeError for no numbers, ValueError for other dtypes and dimensions."""
    try:
        vector = tf.convert_to_tensor(splits)
    except (TypeError, ValueError) as error:
        raise TypeError(f"alltoall: splits must be a list or 1-d tensor of integers: {error}") from None
    if not vector.dtype.is_integer:
        raise checks.no_integers("alltoall", "splits", vector.dtype.name)
    if vector.shape.rank not in (1, None):
        raise ValueError(f"alltoall: splits must have one dimension, got the shape {vector.shape}")
    return vector


def _broadcast(invocation: Invocation, tensors: Sequence[Any], root_rank: int) -> list[Any]:
    """Return the root's tensors, which travel together and have no gradients."""

    def start(invocation: Invocation, arrays: Sequence[Any]) -> int:
        return framework.OPERATIONS.broadcast(invocation, arrays, root_rank)

    return run(invocation, tensors, start, [(tensor.dtype, tensor.shape) for tensor in tensors])


@as_written
def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Give all ranks of ``process_set`` the tensor of ``root_rank``.

    The other arguments and the errors are those of allreduce(). Differentiable: the root's gradient is the average of
    all ranks' gradients, the gradient of another rank is zero. Returns a tensor of the same shape and dtype.

    Args:
        tensor: has the same shape and dtype (one of allreduce()'s, or bool) on all ranks.
        root_rank: counts among all ranks, not in the set.

    Examples:
        >>> hvd.broadcast(tf.fill([2], hvd.rank()), root_rank=1).numpy().tolist()
        [1, 1]
    """
    invocation = Invocation("broadcast", name, process_set, waits=True, ignore_name_scope=ignore_name_scope)
    dense = framework.check_tensor(invocation.function, tensor, framework.MOVABLE_DTYPES)

    def at_root(_: Sequence[Any], gradients: list[Any]) -> list[Any]:
        average_all = invocation.of_gradient()._replace(function="allreduce")
        (average,) = allreduce_dense(average_all, gradients, ReduceRequest(ReduceOp.AVERAGE))
        if runtime.topology().rank == root_rank:
            return [average]
        with tf.control_dependencies([average]):  # else a graph leaves it out, for which the other ranks wait
            return [tf.zeros_like(average)]

    return differentiable([dense], lambda tensors: _broadcast(invocation, tensors, root_rank), at_root)[0]


def _chunks(tensors: Sequence[Any]) -> list[list[Any]]:
    """Return the tensors in lists of at most CHUNK_BYTES."""
    chunks: list[list[Any]] = []
    room = -1
    for tensor in tensors:
        nbytes = (tensor.shape.num_elements() or 0) * tensor.dtype.size
        room -= nbytes
        if room < 0:
            chunks.append([])
            room = CHUNK_BYTES - nbytes
        chunks[-1].append(tensor)
    return chunks


@as_written
def broadcast_(
    variables: Sequence[Any], root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Write the root's values into variables on all ranks. Returns a list of the new values, as tensors.

    The other arguments and errors are those of broadcast(), and TypeError for what cannot be assigned to.

    Args:
        variables: a list of tf.Variable, each of the same shape and dtype on all ranks.

    Examples:
        >>> weight = tf.Variable([hvd.rank(), hvd.rank()])
        >>> _ = hvd.broadcast_([weight], root_rank=1)
        >>> weight.numpy().tolist()
        [1, 1]
    """
    function = "broadcast_"
    variables = list(variables)  # an iterator gives them once
    for index, variable in enumerate(variables):
        if not callable(getattr(variable, "assign", None)):
            raise TypeError(f"{function}: variables[{index}] must be a tf.Variable, got {type(variable).__name__}")
    outputs: list[Any] = []
    values = framework.check_tensors(function, variables, framework.MOVABLE_DTYPES)
    for number, chunk in enumerate(_chunks(values)):
        chunk_name = name if number == 0 or name is None else f"{name}.{number}"
        outputs += _broadcast(Invocation(function, chunk_name, process_set, waits=True), chunk, root_rank)
    for variable, output in zip(variables, outputs, strict=True):
        variable.assign(output)
    return outputs
