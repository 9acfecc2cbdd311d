"""Broadcast: every rank gets the root's tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdkit.api import checks
from hvdkit.api.operations import Invocation
from hvdkit.engine.ops.requests import ReduceRequest
from hvdkit.engine.session import runtime
from hvdkit.engine.session.process_sets import ProcessSet, global_process_set
from hvdkit.kernels.reduce_op import ReduceOp
from hvdkit.tensorflow.ops import framework
from hvdkit.tensorflow.ops.bridge import allreduce_dense, as_written, differentiable, run

# The most bytes of variables that are broadcast together. A model with its optimizer's state can be far larger, and
# all that travels together is in memory twice.
CHUNK_BYTES = 256 << 20


def _broadcast(invocation: Invocation, tensors: Sequence[Any], root_rank: int) -> list[Any]:
    """Return the root's tensors, which travel together and have no gradients."""
    framework.check_arguments(invocation)
    root = checks.check_root(invocation.function, root_rank, invocation.process_set, runtime.topology().size)

    def start(invocation: Invocation, arrays: Sequence[Any]) -> int:
        return framework.OPERATIONS.broadcast(invocation, arrays, root)

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
        return [average if runtime.topology().rank == root_rank else tf.zeros_like(average)]

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
