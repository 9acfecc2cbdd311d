"""All operations under their names, and whether the job is in order after something went wrong."""

from __future__ import annotations

from functools import partial

import torch

from tests.torch.data import equal


def still_works(hvd) -> None:
    """The job goes on: a good operation gives the right result on every rank."""
    assert equal(hvd.allreduce(torch.ones(3), op=hvd.Sum, name="still.works"), torch.full((3,), float(hvd.size())))


def forms(name: str, in_place: bool = False) -> list[str]:
    return [name, f"{name}_async", *([f"{name}_", f"{name}_async_"] if in_place else [])]


def tensor_operations(hvd):
    """Each operation on one tensor under its name; the root of a broadcast is rank 0."""
    names = [*forms("allreduce", in_place=True), *forms("allgather"), *forms("alltoall"), *forms("reducescatter")]
    broadcasts = forms("broadcast", in_place=True)
    return {
        **{name: getattr(hvd, name) for name in names},
        **{name: partial(getattr(hvd, name), root_rank=0) for name in broadcasts},
    }


def grouped_operations(hvd):
    names = [*forms("allreduce", in_place=True), *forms("allgather"), *forms("reducescatter")]
    return {f"grouped_{name}": getattr(hvd, f"grouped_{name}") for name in names}
