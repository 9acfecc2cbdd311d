"""Reduce-scatter: each rank gets some rows of the reduction of all ranks' arrays."""

from __future__ import annotations

from itertools import accumulate
from math import prod
from typing import Any, cast

from hvdkit import kernels
from hvdkit.collectives.compressed import compressed_reduce_scatter
from hvdkit.collectives.exchange import reduce_scatter
from hvdkit.collectives.group import Steps
from hvdkit.collectives.hierarchical import nodes_of
from hvdkit.compression import PayloadCodec
from hvdkit.engine.ops.allreduce import memory_of
from hvdkit.engine.ops.batch import Batch, Kind, Parts


def scatter_rows(rows: int, size: int) -> list[int]:
    """Return the rows of each rank: the first ``rows % size`` ranks hold one more, as in Horovod."""
    each, longer = divmod(rows, size)
    return [each + (rank < longer) for rank in range(size)]


def run(batch: Batch) -> Parts:
    """Reduce and scatter the arrays, one after another; their contents are used up."""
    return [_scatter(batch)]


def _scatter(batch: Batch) -> Steps[list[Any]]:
    group, submission, signature, tag = batch.group, batch.submissions[0], batch.signature, batch.tag
    op, scale = batch.reduction()
    results = []
    for array in submission.arrays:
        flat = kernels.as_real(array.reshape(-1))
        if signature["prescale"] != 1.0:
            kernels.scale_into(flat, flat, signature["prescale"])
        rows = scatter_rows(array.shape[0], group.size)
        width = prod(array.shape[1:]) * array.itemsize // flat.itemsize
        bounds = [((end - count) * width, end * width) for end, count in zip(accumulate(rows), rows, strict=True)]
        if submission.codec.encodes and (submission.codec.everywhere or nodes_of(group) > 1):
            codec, memory = cast("PayloadCodec", submission.codec), memory_of(submission, flat.size)
            summed = yield from compressed_reduce_scatter(group, flat, bounds, scale, codec, tag, memory)
            own = flat[slice(*bounds[group.rank])]
            kernels.convert_into(own, summed)
        else:
            own = yield from reduce_scatter(group, flat, bounds, op, scale, tag)
        results.append(own.view(array.dtype).reshape(rows[group.rank], *array.shape[1:]).copy())
    return [results]


REDUCESCATTER = Kind("reducescatter", run=run)
