"""Named operations on tensors that stay on their device: carried out by the device's collectives, if there are any."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from hvdkit.collectives.group import Array, Group, Steps
from hvdkit.engine.execution import Submission, effective, execute
from hvdkit.engine.requests import Signature
from hvdkit.kernels import ReduceOp
from hvdkit.transports.base import DeviceCollectives


@dataclass(frozen=True)
class DeviceArray:
    """A contiguous tensor of a device. The tensor and the mark behind which it holds its values are opaque here."""

    tensor: Any
    shape: tuple[int, ...]
    dtype: str  # by its name in numpy
    place: str  # "cuda:0"
    mark: Any
    to_host: Callable[[], Array]  # waits for the values and copies them


def reduces_directly(op: ReduceOp, prescale: float, postscale: float, floating: bool) -> bool:
    """Whether an allreduce of tensors, ``floating`` if all of them are, can be done by the device's collectives.

    Adasum cannot, nor can scaled integers, whose averages are exact and cut off.
    """
    scaled = op == ReduceOp.AVERAGE or prescale != 1.0 or postscale != 1.0
    return op != ReduceOp.ADASUM and (floating or not scaled)


def zeros_on_device(collectives: DeviceCollectives, signature: Signature) -> list[DeviceArray]:
    """What a rank that has joined contributes."""
    zeros = []
    for shape, dtype in zip(signature["shape"], signature["dtype"], strict=True):
        tensor = collectives.allocate(prod(shape), dtype)
        zeros.append(DeviceArray(tensor, tuple(shape), dtype, "", collectives.mark(), lambda: None))  # type: ignore[arg-type,return-value]
    return zeros


def execute_direct(
    collectives: DeviceCollectives,
    group: Group,
    kind: str,
    submissions: Sequence[Submission],
    extras: Sequence[Any],
    root: int,
) -> Steps[list[Any]]:
    """Run one batch; returns the tensors of each submission. All is launched before the first yield: see Engine.run."""
    arrays: list[Any] = [array for submission in submissions for array in submission.arrays]
    tensors = [array.tensor for array in arrays]
    marks = [array.mark for array in arrays]
    signature = submissions[0].signature
    nbytes = sum(tensor.nbytes for tensor in tensors)
    if kind == "allreduce":
        op, scale = effective(ReduceOp(signature["op"]), signature["postscale"], group.size)
        group.bytes_sent += 2 * nbytes * (group.size - 1) // group.size
        yield [collectives.allreduce(tensors, op, signature["prescale"], scale, "none", marks)]
    elif kind == "broadcast":
        group.bytes_sent += nbytes if group.rank == root else 0
        yield [collectives.broadcast(tensors, root, marks)]
    else:
        assert kind == "allgather", kind
        group.bytes_sent += nbytes * (group.size - 1)
        rows = [[int(rank_rows[index]) for rank_rows in extras[0]] for index in range(len(tensors))]
        gathered, transfer = collectives.allgather(tensors, rows, marks)
        yield [transfer]
        return [gathered]
    return [[array.tensor for array in submission.arrays] for submission in submissions]


def execute_staged(
    group: Group, kind: str, submissions: Sequence[Submission], extras: Sequence[Any], root: int, tag: int
) -> Steps[list[Any]]:
    """Run one batch through host memory, since these ranks have no collectives of the device; returns host arrays."""
    for submission in submissions:
        submission.arrays = [
            array.to_host() if isinstance(array, DeviceArray) else array for array in submission.arrays
        ]
    return (yield from execute(group, kind, submissions, extras, root, tag))
