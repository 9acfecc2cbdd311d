"""A model whose gradients are large enough for the arena, and where they lie."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from hvdkit.arena import ARENA, SMALLEST_BYTES
from tests.torch.optimizer_support import Comparison
from tests.torch.optimizer_support import Passing as Passing

WIDTH, HIDDEN = 128, 192  # 24,576 elements a matrix: 192 KiB of float64


def wide_net(seed: int = 7) -> nn.Module:
    """Return two matrices that the arena serves and two biases that it does not, the same on every rank."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, WIDTH)).double()


def wide_loss(net: nn.Module, ranks: Iterable[int], step: int = 0, power: int = 2) -> torch.Tensor:
    """Return the mean over all elements: the joined batch's gradient is the mean of the ranks' gradients."""
    generators = [torch.Generator().manual_seed(1000 * step + rank) for rank in ranks]
    inputs = torch.cat([torch.randn(3, WIDTH, generator=one, dtype=torch.float64) for one in generators])
    inputs = inputs.to(next(net.parameters()).dtype)
    return ((net(inputs) - inputs).abs() ** power).mean()


def wide(hvd: Any, **options: Any) -> Comparison:
    return Comparison(hvd, wide_net, loss=wide_loss, relative=1e-12, **options)


def is_served() -> bool:
    """Return True if this job was started with an arena: a test does not ask the arena whether it is there."""
    return os.environ.get("HVDKIT_ARENA", "1") != "0"


def is_reduced_early(optimizer: Any) -> bool:
    """Return True if gradients are reduced where they lie during the backward pass, not when the step is completed."""
    takes_turns = optimizer._synchronizer._agreement.planned.lane.takes_turns
    if "HVDKIT_FUSION_THRESHOLD" in os.environ:
        assert not takes_turns, "a job that is given its buckets overlaps"
    elif os.environ["OMP_NUM_THREADS"] != "1":
        assert takes_turns, "a job whose threads have every core does not overlap"
    return is_served() and not takes_turns


def assert_born_in_arena(tensors: Iterable[torch.Tensor]) -> None:
    """Check that those of a served size lie in the arena, if there is one, and the others never do."""
    for tensor in tensors:
        wanted = is_served() and tensor.nbytes >= SMALLEST_BYTES
        assert ARENA.contains(tensor.data_ptr()) == wanted, (tuple(tensor.shape), tensor.dtype, wanted)


def assert_same_bits(hvd: Any, tensors: Sequence[torch.Tensor]) -> None:
    """Check that all ranks hold the same bits."""
    bits = [tensor.detach().contiguous().view(torch.uint8).numpy().tobytes() for tensor in tensors]
    assert all(others == bits for others in hvd.allgather_object(bits)), "ranks hold different bits"


def same_tensors(tensors: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    """Return True if these are the very tensors."""
    return all(tensor is other for tensor, other in zip(tensors, others, strict=True))


def same_values(tensors: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, tensors, others))


def randn(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)
