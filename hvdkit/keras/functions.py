"""Collective operations on what Keras's backend takes for a tensor, and bringing models to one state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdkit.api import checks
from hvdkit.api.gradients import guard
from hvdkit.api.gradients.compression import Compressions
from hvdkit.engine.life import runtime
from hvdkit.engine.ops.requests import Call, ReduceRequest
from hvdkit.keras.backend import adapter, backend
from hvdkit.keras.keras_2 import variables_of
from hvdkit.kernels.reduce_op import ReduceOp


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: int | None = None,
    compression: Any = Compressions.none,
) -> Any:
    """Reduce a tensor, or what becomes one, over all ranks; the average unless ``op`` says otherwise.

    ``value`` has the same shape and type on all ranks. Returns a tensor of the backend. Errors are those of the
    backend's allreduce().
    """
    result = adapter().allreduce(
        backend().tensor(value),
        name=name,
        op=checks.op_or_average("allreduce", op, average),
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        compression=compression,
    )
    guard.mark([result])
    return result


def allgather(value: Any, name: str | None = None) -> Any:
    """The ranks' tensors one after the other along the first dimension, the only one in which they may differ."""
    return adapter().allgather(backend().tensor(value), name=name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """The tensor of ``root_rank``, on all ranks."""
    return adapter().broadcast(backend().tensor(value), root_rank, name=name)


def reducescatter(value: Any, name: str | None = None, op: int = ReduceOp.AVERAGE) -> Any:
    """This rank's share, along the first dimension, of the reduced tensor."""
    return adapter().reducescatter(backend().tensor(value), name=name, op=op)


def broadcast_variables(variables: Sequence[Any], root_rank: int = 0) -> None:
    """Write the values of ``root_rank`` into the variables (of a model, an optimizer) on all ranks.

    Raises ValueError for variables without values yet, HorovodInternalError on every rank where ranks disagree.
    """
    backend().broadcast_variables(variables, root_rank)


def broadcast_global_variables(root_rank: int, model: Any = None) -> None:
    """Give all ranks the values of ``root_rank`` of all variables of ``model`` and of its optimizer.

    Keras 3 keeps no list of all variables: without a model it raises RuntimeError, as Horovod does in eager execution.
    """
    if model is None:
        raise RuntimeError(
            "hvd.broadcast_global_variables() does not support eager execution. "
            "Please use `hvd.broadcast_global_variables(root_rank, model)`, "
            "`hvd.broadcast_variables(model.variables, root_rank)` or the callback BroadcastGlobalVariablesCallback "
            "instead."
        )
    optimizer = getattr(model, "optimizer", None)
    broadcast_variables([*model.variables, *(variables_of(optimizer) if optimizer is not None else ())], root_rank)


def average_numbers(numbers: Sequence[float], name: str) -> list[float]:
    """The averages over all ranks of a few numbers."""
    array = np.array(numbers, np.float64)
    if array.size:
        runtime.engine().allreduce([array], ReduceRequest(ReduceOp.AVERAGE), Call(name, wake=False)).wait()
    return [float(number) for number in array]
