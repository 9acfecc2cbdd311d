"""Allgather, broadcast, alltoall and reduce-scatter: operations by which ranks get rows of each other's arrays."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from hvdkit import kernels
from hvdkit.collectives.compressed import compressed_reduce_scatter
from hvdkit.collectives.exchange import allgather, alltoall, broadcast, reduce_scatter
from hvdkit.collectives.group import Array, Steps
from hvdkit.collectives.hierarchical import nodes_of
from hvdkit.compression import PayloadCodec
from hvdkit.engine.ops.allreduce import state_for
from hvdkit.engine.ops.batch import Batch, Kind, Requests
from hvdkit.engine.ops.requests import Key, Request
from hvdkit.engine.ranks.assignments import Assignments

if TYPE_CHECKING:
    from hvdkit.transports.gpu.device import DeviceCollectives


def _details_of_all(assignments: Assignments, key: Key, requests: Requests) -> list[Any]:
    """Return the details of all members, in their order."""
    return [requests[rank].detail for rank in assignments.members[key.process_set]]


def _split(array: Array, counts: Sequence[int]) -> list[Array]:
    """Return flat parts of an array, of so many rows each."""
    return [array[end - count : end].reshape(-1) for end, count in zip(accumulate(counts), counts, strict=True)]


def _rows(batch: Batch, index: int) -> list[int]:
    """Return the rows of each rank's array number ``index``."""
    return [int(rank_rows[index]) for rank_rows in batch.extras[0]]


def _allgather(batch: Batch) -> Steps[list[Any]]:
    """Concatenate each rank's arrays along the first dimension."""
    results = []
    for index, array in enumerate(batch.submissions[0].arrays):
        rows = _rows(batch, index)
        out = np.empty((sum(rows), *array.shape[1:]), dtype=array.dtype)
        yield from allgather(batch.group, array.reshape(-1), _split(out, rows), batch.tag)
        results.append(out)
    return [results]


def _allgather_on_device(collectives: DeviceCollectives, batch: Batch) -> Steps[list[Any]]:
    """Gather all arrays in one call of the device's library."""
    arrays: Sequence[Any] = batch.submissions[0].arrays
    tensors = [array.tensor for array in arrays]
    batch.group.bytes_sent += sum(tensor.nbytes for tensor in tensors) * (batch.group.size - 1)
    rows = [_rows(batch, index) for index in range(len(tensors))]
    gathered, transfer = collectives.allgather(tensors, rows, [array.mark for array in arrays])
    yield [transfer]
    return [gathered]


def _root(batch: Batch) -> int:
    """Return the index of the root among the group's members."""
    return batch.group.members.index(batch.signature["root"])


def _broadcast(batch: Batch) -> Steps[list[Any]]:
    arrays = batch.submissions[0].arrays
    for array in arrays:
        yield from broadcast(batch.group, array.reshape(-1), _root(batch), batch.tag)
    return [arrays]


def _broadcast_on_device(collectives: DeviceCollectives, batch: Batch) -> Steps[list[Any]]:
    """Broadcast all arrays in one call of the device's library."""
    arrays: list[Any] = batch.submissions[0].arrays
    tensors, root = [array.tensor for array in arrays], _root(batch)
    batch.group.bytes_sent += sum(tensor.nbytes for tensor in tensors) if batch.group.rank == root else 0
    yield [collectives.broadcast(tensors, root, [array.mark for array in arrays])]
    return [tensors]


def _wrong_splits(key: Key, rank: int, request: Request, size: int) -> str | None:
    """Return the error in a rank's splits, if any. The detail is [rows, splits or None], or the error that it saw."""
    if isinstance(request.detail, str):
        return f"Mismatched splits for {key}: rank {rank}: {request.detail}"
    rows, splits = request.detail
    if splits is None and rows % size:
        return (
            f"Mismatched splits for {key}: rank {rank} sent no splits, and its first dimension {rows} "
            f"cannot be divided by {size} ranks.\n"
            "HINT: pass splits, one number of rows for each rank."
        )
    if splits is not None and (len(splits) != size or min(splits) < 0 or sum(splits) > rows):
        return (
            f"Mismatched splits for {key}: rank {rank} sent splits {splits} for a first dimension of {rows} "
            f"and {size} ranks.\n"
            "HINT: pass one number of rows for each rank; each is 0 or more, their sum at most the first dimension."
        )
    return None


def _alltoall(batch: Batch) -> Steps[list[Any]]:
    """Exchange rows. The result is the received rows, and the number of rows from each rank."""
    group, array = batch.group, batch.submissions[0].arrays[0]
    splits = [splits or [rows // group.size] * group.size for rows, splits in batch.extras[0]]
    received = [int(rank_splits[group.rank]) for rank_splits in splits]
    out = np.empty((sum(received), *array.shape[1:]), dtype=array.dtype)
    yield from alltoall(group, _split(array, splits[group.rank]), _split(out, received), batch.tag)
    return [(out, received)]


def _reduce_scatter(batch: Batch) -> Steps[list[Any]]:
    """Reduce arrays and keep this rank's rows of each; the contents of the arrays are used up."""
    group, submission, signature, tag = batch.group, batch.submissions[0], batch.signature, batch.tag
    op, scale = batch.reduction()
    results = []
    for array in submission.arrays:
        flat = kernels.as_real(array.reshape(-1))
        if signature["prescale"] != 1.0:
            kernels.scale_into(flat, flat, signature["prescale"])
        each, longer = divmod(array.shape[0], group.size)
        rows = [each + (rank < longer) for rank in range(group.size)]  # as in Horovod
        width = prod(array.shape[1:]) * array.itemsize // flat.itemsize
        bounds = [((end - count) * width, end * width) for end, count in zip(accumulate(rows), rows, strict=True)]
        if submission.codec.encodes and (submission.codec.everywhere or nodes_of(group) > 1):
            codec, memory = cast("PayloadCodec", submission.codec), state_for(submission, flat.size)
            summed = yield from compressed_reduce_scatter(group, flat, bounds, scale, codec, tag, memory)
            own = flat[slice(*bounds[group.rank])]
            kernels.convert_into(own, summed)
        else:
            own = flat[slice(*bounds[group.rank])]
            yield from reduce_scatter(group, flat, bounds, own, op, scale, tag)
        results.append(own.view(array.dtype).reshape(rows[group.rank], *array.shape[1:]).copy())
    return [results]


ALLGATHER = Kind(
    "allgather", decide=_details_of_all, run=lambda batch: [_allgather(batch)], run_on_device=_allgather_on_device
)
BROADCAST = Kind("broadcast", run=lambda batch: [_broadcast(batch)], run_on_device=_broadcast_on_device)
ALLTOALL = Kind("alltoall", wrong=_wrong_splits, decide=_details_of_all, run=lambda batch: [_alltoall(batch)])
REDUCESCATTER = Kind("reducescatter", run=lambda batch: [_reduce_scatter(batch)])
