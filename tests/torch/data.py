"""Inputs that every rank can compute for every other rank, so that each knows what an operation must return."""

from __future__ import annotations

from typing import Any

import torch

INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
REDUCIBLE = [*INTEGERS, *FLOATS]
MOVABLE = [*REDUCIBLE, torch.bool, torch.complex64, torch.complex128]
SHAPES = [(), (7,), (3, 5), (2, 3, 4)]


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Small whole numbers, so that sums and products over a few ranks are exact in every type."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    numbers = torch.randint(0, 4, shape, generator=generator)
    return numbers.to(dtype)


def all_values(size: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    """``values`` of each rank."""
    return [values(rank, shape, dtype, seed) for rank in range(size)]


def equal(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """Same type, shape and every element."""
    return got.dtype == expected.dtype and got.shape == expected.shape and bool((got == expected).all())


def same(state: Any, other: Any) -> bool:
    """True if two states have the same structure and numbers, and tensors that are ``equal``."""
    if isinstance(state, torch.Tensor):
        return isinstance(other, torch.Tensor) and equal(state, other)
    if isinstance(state, dict):
        return state.keys() == other.keys() and all(same(state[key], other[key]) for key in state)
    if isinstance(state, (list, tuple)):
        return len(state) == len(other) and all(map(same, state, other))
    return bool(state == other)


def total(tensors: list[torch.Tensor]) -> torch.Tensor:
    """The sum in the tensors' own type."""
    return torch.stack(tensors).double().sum(dim=0).to(tensors[0].dtype)


def reductions(hvd: Any, tensors: list[torch.Tensor]) -> list[tuple[Any, torch.Tensor]]:
    """Each operation that reduces elements by themselves, and what it makes of the tensors, in their own type."""
    stacked = torch.stack(tensors).double()
    results = {
        hvd.Sum: stacked.sum(dim=0),
        hvd.Min: stacked.amin(dim=0),
        hvd.Max: stacked.amax(dim=0),
        hvd.Product: stacked.prod(dim=0),
    }
    return [(op, result.to(tensors[0].dtype)) for op, result in results.items()]


def mean(tensors: list[torch.Tensor]) -> torch.Tensor:
    """The average in the tensors' own type, cut off for integers."""
    return (torch.stack(tensors).double().sum(dim=0) / len(tensors)).to(tensors[0].dtype)
