"""Alltoall: rows of an array for each rank."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from hvdkit.collectives.exchange import alltoall
from hvdkit.collectives.group import Array, Steps
from hvdkit.engine.ops.allgather import details_of_all
from hvdkit.engine.ops.batch import Batch, Kind, Parts
from hvdkit.engine.ops.requests import Key, Request


def wrong_splits(key: Key, rank: int, request: Request, size: int) -> str | None:
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
            "HINT: pass one number of rows for each rank, 0 or more, at most all rows together."
        )
    return None


def run(batch: Batch) -> Parts:
    """Exchange rows; the result is the rows that came in, and how many came from each rank."""
    return [_exchange(batch)]


def _exchange(batch: Batch) -> Steps[list[Any]]:
    group, array = batch.group, batch.submissions[0].arrays[0]
    splits = [splits or [rows // group.size] * group.size for rows, splits in batch.extras[0]]
    received = [int(rank_splits[group.rank]) for rank_splits in splits]
    out = np.empty((sum(received), *array.shape[1:]), dtype=array.dtype)
    yield from alltoall(group, _rows(array, splits[group.rank]), _rows(out, received), batch.tag)
    return [(out, received)]


def _rows(array: Array, counts: Sequence[int]) -> list[Array]:
    return [array[end - count : end].reshape(-1) for end, count in zip(accumulate(counts), counts, strict=True)]


ALLTOALL = Kind("alltoall", wrong=wrong_splits, decide=details_of_all, run=run)
