"""What the tests of the arena share: blocks of sizes that are served, and what lies where."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hvdkit.arena import ARENA

MIB = 1 << 20


@contextmanager
def served(*sizes: int) -> Iterator[None]:
    """Tensors of these many bytes are born in the arena where that is asked for."""
    assert ARENA.open(True) >= 0, ARENA.reason
    assert ARENA.serve_torch() == ""
    added = ARENA.add_sizes(sizes)
    try:
        yield
    finally:
        ARENA.remove_sizes(added)


def born(nbytes: int) -> torch.Tensor:
    """A tensor of bytes, made as in a backward pass."""
    with ARENA.serving():
        return torch.empty(nbytes, dtype=torch.uint8)


def lies_in_arena(tensor: torch.Tensor) -> bool:
    return ARENA.contains(tensor.data_ptr())


def counts() -> dict[str, int]:
    """How many allocations were served and refused, and the bytes that are used and populated."""
    from hvdkit.kernels._native import arena

    return dict(zip(("served", "refused", "used", "populated"), arena.counts(), strict=True))


def used() -> int:
    return counts()["used"]


def populated() -> int:
    return counts()["populated"]


@contextmanager
def peer_of(offset: int, nbytes: int) -> Iterator[mmap.mmap]:
    """A part of the arena's file as another rank has it."""
    descriptor = os.dup(ARENA.open(True))
    try:
        with mmap.mmap(descriptor, nbytes, offset=offset) as mapping:
            yield mapping
    finally:
        os.close(descriptor)
