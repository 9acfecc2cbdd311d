"""A framework of one's own, in one file: numpy arrays, whose gradients are written by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hvdkit.api import checks
from hvdkit.api.framework import Framework
from hvdkit.api.operations import HANDLES, Invocation, Operations
from hvdkit.engine.ops.requests import ReduceRequest
from hvdkit.engine.session.process_sets import ProcessSet, global_process_set
from hvdkit.kernels import ReduceOp


class Numpy(Framework[np.ndarray]):
    """Buffers are arrays, which is what the engine takes."""

    scalar_to_row = "array.reshape(1)"

    def device(self, tensor: np.ndarray) -> str:
        return "cpu"

    def dtype(self, tensor: np.ndarray) -> str:
        return tensor.dtype.name

    def views(self, tensors: Sequence[np.ndarray]) -> list[Any]:
        return [np.asarray(tensor, order="C") for tensor in tensors]

    def copies(self, tensors: Sequence[np.ndarray]) -> list[Any]:
        return [np.array(tensor, order="C") for tensor in tensors]

    def likes(self, tensors: Sequence[Any]) -> list[Any]:
        return [np.empty(tensor.shape, tensor.dtype) for tensor in tensors]

    def arrays(self, buffers: list[Any]) -> list[Any]:
        return buffers

    def results(self, devices: Sequence[Any], made: Sequence[Any]) -> list[np.ndarray]:
        return list(made)

    def integers(self, numbers: Sequence[int], splits: Any, device: Any) -> np.ndarray:
        return np.array(numbers, dtype=getattr(splits, "dtype", np.int32))

    def check_writable(self, function: str, tensors: Sequence[np.ndarray]) -> None:
        if not all(tensor.flags.writeable for tensor in tensors):
            raise ValueError(f"{function}: array must be writable")

    def write(self, tensors: Sequence[np.ndarray], made: Sequence[Any]) -> None:
        for tensor, one in zip(tensors, made, strict=True):
            tensor[...] = one


OPERATIONS = Operations(Numpy())
SUM = ReduceRequest(ReduceOp.SUM)
synchronize = HANDLES.synchronize


def allreduce_async(array: np.ndarray, name: str | None = None, request: ReduceRequest = SUM) -> int:
    return OPERATIONS.allreduce(Invocation("allreduce_async", name, global_process_set, single=True), [array], request)


def grouped_allreduce(
    arrays: Sequence[np.ndarray],
    name: str | None = None,
    request: ReduceRequest = SUM,
    process_set: ProcessSet = global_process_set,
) -> tuple[np.ndarray, ...]:
    checks.check_listed("grouped_allreduce", arrays, (np.ndarray,))
    return synchronize(
        OPERATIONS.allreduce(Invocation("grouped_allreduce", name, process_set, waits=True), arrays, request)
    )


def broadcast(array: np.ndarray, root_rank: int, name: str | None = None) -> np.ndarray:
    invocation = Invocation("broadcast", name, global_process_set, waits=True, single=True)
    return synchronize(OPERATIONS.broadcast(invocation, [array], root_rank))


def broadcast_(array: np.ndarray, root_rank: int, name: str | None = None) -> np.ndarray:
    invocation = Invocation("broadcast_", name, global_process_set, waits=True, single=True)
    return synchronize(OPERATIONS.broadcast(invocation, [array], root_rank, in_place=True))


def allgather(array: np.ndarray, name: str | None = None) -> np.ndarray:
    invocation = Invocation("allgather", name, global_process_set, waits=True, single=True)
    return synchronize(OPERATIONS.allgather(invocation, [array]))


def reducescatter(array: np.ndarray, name: str | None = None, request: ReduceRequest = SUM) -> np.ndarray:
    invocation = Invocation("reducescatter", name, global_process_set, waits=True, single=True)
    return synchronize(OPERATIONS.reducescatter(invocation, [array], request))


def alltoall(array: np.ndarray, splits: Any = None, name: str | None = None) -> tuple[np.ndarray, np.ndarray]:
    invocation = Invocation("alltoall", name, global_process_set, waits=True)
    return synchronize(OPERATIONS.alltoall(invocation, array, lambda: splits))


def differentiable_sum(array: np.ndarray, name: str) -> tuple[np.ndarray, Callable[[np.ndarray], np.ndarray]]:
    """The sum over all ranks, and what makes its gradient that of the array: their sum again."""
    invocation = Invocation("allreduce", name, global_process_set, waits=True, single=True)
    result = synchronize(OPERATIONS.allreduce(invocation, [array], SUM))
    return result, lambda gradient: synchronize(OPERATIONS.allreduce(invocation.of_gradient(), [gradient], SUM))


def train(weights: list[np.ndarray], rows: np.ndarray, wanted: np.ndarray, rate: float) -> None:
    """One step of two layers with a ReLU between them, by the average gradient of all ranks' mean squared errors."""
    first, second = weights
    hidden = np.maximum(rows @ first, 0.0)
    of_output = 2.0 * (hidden @ second - wanted) / wanted.size
    of_hidden = np.where(hidden > 0.0, of_output @ second.T, 0.0)
    gradients = [rows.T @ of_hidden, hidden.T @ of_output]
    averages = grouped_allreduce(gradients, "gradients", ReduceRequest(ReduceOp.AVERAGE))
    for weight, average in zip(weights, averages, strict=True):
        weight -= rate * average
