"""Broadcast: the root's arrays for all."""

from __future__ import annotations

from typing import Any

from hvdkit.collectives.broadcast import broadcast
from hvdkit.collectives.group import Steps
from hvdkit.engine.ops.batch import Batch, Kind, Parts
from hvdkit.transports.base import DeviceCollectives


def _root(batch: Batch) -> int:
    """Return the index of the root among the group's members."""
    return batch.group.members.index(batch.signature["root"])


def run(batch: Batch) -> Parts:
    """Broadcast the arrays in place, one after another."""
    return [_broadcast(batch)]


def _broadcast(batch: Batch) -> Steps[list[Any]]:
    arrays = batch.submissions[0].arrays
    for array in arrays:
        yield from broadcast(batch.group, array.reshape(-1), _root(batch), batch.tag)
    return [arrays]


def run_on_device(collectives: DeviceCollectives, batch: Batch) -> Steps[list[Any]]:
    """Broadcast all arrays in one call of the device's library."""
    arrays: list[Any] = batch.submissions[0].arrays
    tensors, root = [array.tensor for array in arrays], _root(batch)
    batch.group.bytes_sent += sum(tensor.nbytes for tensor in tensors) if batch.group.rank == root else 0
    yield [collectives.broadcast(tensors, root, [array.mark for array in arrays])]
    return [tensors]


BROADCAST = Kind("broadcast", run=run, run_on_device=run_on_device)
