"""Broadcast: every rank gets the root's tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdkit.api import checks
from hvdkit.api.operations import Asked
from hvdkit.engine.ops.requests import ReduceRequest
from hvdkit.engine.session import runtime
from hvdkit.engine.session.process_sets import ProcessSet, global_process_set
from hvdkit.kernels.reduce_op import ReduceOp
from hvdkit.tensorflow.ops import tensor_checks
from hvdkit.tensorflow.ops.bridge import differentiable, run
from hvdkit.tensorflow.ops.framework import OPERATIONS
from hvdkit.tensorflow.ops.reduction import reduce
from hvdkit.tensorflow.ops.unconverted import as_written

# Of variables that are broadcast together.
CHUNK_BYTES = 256 << 20


def _broadcast(asked: Asked, tensors: Sequence[Any], root_rank: int) -> list[Any]:
    """Not differentiable. Several tensors travel together."""
    tensor_checks.check_asked(asked)
    root = checks.check_root(asked.function, root_rank, asked.process_set, runtime.topology().size)
    return run(
        asked,
        tensors,
        lambda asked, some: OPERATIONS.broadcast(asked, some, root),
        [(tensor.dtype, tensor.shape) for tensor in tensors],
        stays_on_device=lambda: True,
    )


@as_written
def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Give all ranks of ``process_set`` the tensor of ``root_rank``.

    ``name`` and ``ignore_name_scope`` are those of allreduce(). Differentiable: the root's gradient is the average of
    all ranks' gradients, that of the others zero.

    Args:
        tensor: has the same shape and dtype (one of allreduce()'s, or bool) on all ranks.
        root_rank: counts among all ranks, not in the set.
        process_set: the ranks that take part.

    Returns:
        A tensor of the same shape and dtype.

    Raises:
        TypeError, ValueError: for arguments that make no sense.
        HorovodInternalError: on every rank where ranks disagree.

    Examples:
        >>> hvd.broadcast(tf.fill([2], hvd.rank()), root_rank=1).numpy().tolist()
        [1, 1]
    """
    asked = Asked("broadcast", name, process_set, waits=True, ignore_name_scope=ignore_name_scope)
    found = tensor_checks.check_tensor(asked.function, tensor, tensor_checks.MOVABLE_DTYPES)

    def at_root(_: Sequence[Any], gradients: list[Any]) -> list[Any]:
        of_all = asked.of_gradient()._replace(function="allreduce")
        (average,) = reduce(of_all, gradients, ReduceRequest(ReduceOp.AVERAGE))
        return [average if runtime.topology().rank == root_rank else tf.zeros_like(average)]

    return differentiable([found], lambda tensors: _broadcast(asked, tensors, root_rank), at_root)[0]


def _chunks(tensors: Sequence[Any]) -> list[list[Any]]:
    """Tensors that travel together: not a whole model with its optimizer's state, of which there are copies then."""
    chunks: list[list[Any]] = [[]]
    nbytes = 0
    for tensor in tensors:
        size = (tensor.shape.num_elements() or 0) * tensor.dtype.size
        if chunks[-1] and nbytes + size > CHUNK_BYTES:
            chunks.append([])
            nbytes = 0
        chunks[-1].append(tensor)
        nbytes += size
    return chunks


@as_written
def broadcast_(
    variables: Sequence[Any], root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Write the root's values into variables on all ranks.

    The other arguments and errors are those of broadcast(), and TypeError for what cannot be assigned to.

    Args:
        variables: a list of tf.Variable, each of the same shape and dtype on all ranks.

    Returns:
        A list of the new values, as tensors.

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
    if not variables:
        return []
    values = tensor_checks.check_tensors(function, variables, tensor_checks.MOVABLE_DTYPES)
    outputs: list[Any] = []
    for number, some in enumerate(_chunks(values)):
        some_name = name if number == 0 or name is None else f"{name}.{number}"
        outputs += _broadcast(Asked(function, some_name, process_set, waits=True), some, root_rank)
    for variable, output in zip(variables, outputs, strict=True):
        variable.assign(output)
    return outputs
