"""All operations under their names, and whether the job is in order after something went wrong."""

from __future__ import annotations

import torch

from tests.torch.data import equal


def still_works(hvd) -> None:
    """The job goes on: a good operation gives the right result on every rank."""
    assert equal(hvd.allreduce(torch.ones(3), op=hvd.Sum, name="still.works"), torch.full((3,), float(hvd.size())))


def tensor_operations(hvd):
    """Each operation on one tensor under its name."""
    return {
        "allreduce": hvd.allreduce,
        "allreduce_": hvd.allreduce_,
        "allreduce_async": hvd.allreduce_async,
        "allreduce_async_": hvd.allreduce_async_,
        "allgather": hvd.allgather,
        "allgather_async": hvd.allgather_async,
        "broadcast": lambda tensor, **options: hvd.broadcast(tensor, 0, **options),
        "broadcast_": lambda tensor, **options: hvd.broadcast_(tensor, 0, **options),
        "broadcast_async": lambda tensor, **options: hvd.broadcast_async(tensor, 0, **options),
        "broadcast_async_": lambda tensor, **options: hvd.broadcast_async_(tensor, 0, **options),
        "alltoall": hvd.alltoall,
        "alltoall_async": hvd.alltoall_async,
        "reducescatter": hvd.reducescatter,
        "reducescatter_async": hvd.reducescatter_async,
    }


def grouped_operations(hvd):
    """Each grouped operation under its name."""
    return {
        "grouped_allreduce": hvd.grouped_allreduce,
        "grouped_allreduce_": hvd.grouped_allreduce_,
        "grouped_allreduce_async": hvd.grouped_allreduce_async,
        "grouped_allreduce_async_": hvd.grouped_allreduce_async_,
        "grouped_allgather": hvd.grouped_allgather,
        "grouped_allgather_async": hvd.grouped_allgather_async,
        "grouped_reducescatter": hvd.grouped_reducescatter,
        "grouped_reducescatter_async": hvd.grouped_reducescatter_async,
    }
