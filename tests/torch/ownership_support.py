"""A model whose gradients are large enough for the arena, and what plain PyTorch makes of the same steps."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from hvdkit.arena import ARENA, SMALLEST_BYTES

WIDTH, HIDDEN = 128, 192  # 24,576 elements a matrix: 192 KiB of float64


def wide_net(seed: int = 7) -> nn.Module:
    """Two matrices that the arena serves and two biases that it does not, in float64: the same on every rank."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, WIDTH)).double()


def wide_batch(rank: int, step: int = 0) -> torch.Tensor:
    """A rank's inputs in a step."""
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1000 * step + rank), dtype=torch.float64)


def wide_loss(net: nn.Module, inputs: torch.Tensor, power: int = 2) -> torch.Tensor:
    """The mean over all elements: the joined batch's gradient is the mean of the ranks' gradients."""
    return ((net(inputs) - inputs).abs() ** power).mean()


def joined_loss(net: nn.Module, size: int, step: int = 0, power: int = 2) -> torch.Tensor:
    """The loss of one process on all ranks' batches."""
    return wide_loss(net, torch.cat([wide_batch(rank, step) for rank in range(size)]), power)


def sgd(hvd: Any, net: nn.Module, **options: Any) -> Any:
    """A distributed optimizer for a model."""
    plain = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    return hvd.DistributedOptimizer(plain, named_parameters=net.named_parameters(), **options)


def step_with(optimizer: Any) -> None:
    """The update, after synchronize()."""
    with optimizer.skip_synchronize():
        optimizer.step()


def gradients(net: nn.Module) -> list[torch.Tensor]:
    """The very tensors."""
    found = [parameter.grad for parameter in net.parameters()]
    assert all(gradient is not None for gradient in found)
    return found  # type: ignore[return-value]


def is_served() -> bool:
    """Whether this job was started with an arena: a test that expects one says so, and does not ask the arena."""
    return os.environ.get("HVDKIT_ARENA", "1") != "0"


def is_reduced_early(optimizer: Any) -> bool:
    """Whether gradients are reduced where they lie while the backward pass runs, and not when the step is completed."""
    takes_turns = optimizer._synchronizer._agreement.planned.lane.takes_turns
    if "HVDKIT_FUSION_THRESHOLD" in os.environ:
        assert not takes_turns, "a job that is given its buckets overlaps"
    elif os.environ["OMP_NUM_THREADS"] != "1":
        assert takes_turns, "a job whose threads have every core does not overlap"
    return is_served() and not takes_turns


def assert_born_in_arena(tensors: Iterable[torch.Tensor]) -> None:
    """Those of a served size lie in the arena, if there is one, and the others never do."""
    for tensor in tensors:
        wanted = is_served() and tensor.nbytes >= SMALLEST_BYTES
        assert ARENA.contains(tensor.data_ptr()) == wanted, (tuple(tensor.shape), tensor.dtype, wanted)


def assert_equal_to(net: nn.Module, expected: nn.Module, gradients_too: bool = True, relative: float = 1e-12) -> None:
    """Parameters, and gradients, are those of ``expected`` but for rounding."""
    for (name, ours), theirs in zip(net.named_parameters(), expected.parameters(), strict=True):
        close(ours.detach(), theirs.detach(), name, relative)
        if gradients_too:
            assert ours.grad is not None, name
            assert theirs.grad is not None, name
            close(ours.grad, theirs.grad, f"gradient of {name}", relative)


def close(actual: torch.Tensor, expected: torch.Tensor, what: str = "tensor", relative: float = 1e-12) -> None:
    """The largest difference is at most ``relative`` of the largest value."""
    scale = expected.abs().max().item() or 1.0
    difference = (actual - expected).abs().max().item()
    assert difference <= relative * scale, f"{what} differs by {difference:.3g} of {scale:.3g}"


def bits_on_all_ranks(hvd: Any, tensors: Sequence[torch.Tensor]) -> None:
    """All ranks hold the same bits."""
    mine = [tensor.detach().contiguous().view(torch.uint8).numpy().tobytes() for tensor in tensors]
    everyones = hvd.allgather_object(mine)
    assert all(theirs == mine for theirs in everyones), "ranks hold different bits"


class Passing:
    """A compression of the user's own that compresses nothing, so gradients are reduced by name."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, context: Any) -> torch.Tensor:
        return tensor
