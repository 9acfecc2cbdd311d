"""Inputs that every rank can compute for every other rank, so that each knows what an operation must return."""

from __future__ import annotations

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


def total(tensors: list[torch.Tensor]) -> torch.Tensor:
    """The sum in the tensors' own type."""
    return torch.stack(tensors).double().sum(dim=0).to(tensors[0].dtype)


def mean(tensors: list[torch.Tensor]) -> torch.Tensor:
    """The average in the tensors' own type, cut off for integers."""
    return (torch.stack(tensors).double().sum(dim=0) / len(tensors)).to(tensors[0].dtype)
