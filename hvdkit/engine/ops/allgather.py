"""Allgather: each rank's arrays, one after the other along the first dimension."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from hvdkit.collectives.exchange import allgather
from hvdkit.collectives.group import Steps
from hvdkit.engine.ops.batch import Batch, Kind, Parts, Requests
from hvdkit.engine.ops.requests import Key
from hvdkit.engine.ranks.assignments import Assignments
from hvdkit.transports.base import DeviceCollectives


def details_of_all(assignments: Assignments, key: Key, requests: Requests) -> list[Any]:
    """Return the details of all members, in their order."""
    return [requests[rank].detail for rank in assignments.members[key.process_set]]


def run(batch: Batch) -> Parts:
    """Gather the arrays, one after another."""
    return [_gather(batch)]


def _gather(batch: Batch) -> Steps[list[Any]]:
    results = []
    for index, array in enumerate(batch.submissions[0].arrays):
        rows = _rows(batch, index)
        out = np.empty((sum(rows), *array.shape[1:]), dtype=array.dtype)
        ends = list(accumulate(rows))
        segments = [out[end - count : end].reshape(-1) for end, count in zip(ends, rows, strict=True)]
        yield from allgather(batch.group, array.reshape(-1), segments, batch.tag)
        results.append(out)
    return [results]


def _rows(batch: Batch, index: int) -> list[int]:
    """Return the rows of each rank's array number ``index``."""
    return [int(rank_rows[index]) for rank_rows in batch.extras[0]]


def run_on_device(collectives: DeviceCollectives, batch: Batch) -> Steps[list[Any]]:
    """Gather all arrays in one call of the device's library."""
    arrays: Sequence[Any] = batch.submissions[0].arrays
    tensors = [array.tensor for array in arrays]
    batch.group.bytes_sent += sum(tensor.nbytes for tensor in tensors) * (batch.group.size - 1)
    rows = [_rows(batch, index) for index in range(len(tensors))]
    gathered, transfer = collectives.allgather(tensors, rows, [array.mark for array in arrays])
    yield [transfer]
    return [gathered]


ALLGATHER = Kind("allgather", decide=details_of_all, run=run, run_on_device=run_on_device)
