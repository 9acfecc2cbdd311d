"""A small model, a batch that is split over the ranks, and what one process alone would compute."""

from __future__ import annotations

import contextlib
import hashlib
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

ROWS = 4  # of each rank's batch


class Net(nn.Module):
    """Linear and convolution, with a parameter that no forward pass uses unless asked."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3, padding=1)
        self.hidden = nn.Linear(48, 8)
        self.out = nn.Linear(8, 2)
        self.spare = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor, use_spare: bool = False) -> torch.Tensor:
        features = torch.tanh(self.hidden(torch.tanh(self.conv(x)).flatten(1)))
        return self.out(features) + self.spare(features) if use_spare else self.out(features)


def make_net(seed: int = 1) -> Net:
    """The same weights on every rank."""
    torch.manual_seed(seed)
    return Net()


def batch(rank: int, step: int = 0, rows: int = ROWS) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's inputs and targets in a step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(rows, 1, 4, 4, generator=generator), torch.randn(rows, 2, generator=generator)


def joined_batch(size: int, step: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """All ranks' batches as one."""
    inputs, targets = zip(*(batch(rank, step) for rank in range(size)), strict=True)
    return torch.cat(inputs), torch.cat(targets)


def loss_of(net: nn.Module, data: tuple[torch.Tensor, torch.Tensor], **options: Any) -> torch.Tensor:
    """The mean over all elements, so that the joined batch's gradient is the mean of the ranks' gradients."""
    return nn.functional.mse_loss(net(data[0], **options), data[1])


def assert_close(actual: torch.Tensor, expected: torch.Tensor, relative: float = 1e-6) -> None:
    """The largest difference is at most ``relative`` of the largest value."""
    scale = expected.abs().max().item() or 1.0
    difference = (actual - expected).abs().max().item()
    assert difference <= relative * scale, f"differs by {difference:.3g} where the largest value is {scale:.3g}"


def assert_same_gradients(net: nn.Module, expected: nn.Module, relative: float = 1e-6, factor: float = 1.0) -> None:
    """The gradients of ``net`` are those of ``expected`` times ``factor``; no gradient counts as zeros."""
    for (name, ours), theirs in zip(net.named_parameters(), expected.parameters(), strict=True):
        if ours.grad is None and theirs.grad is None:
            continue
        assert ours.grad is not None, name
        wanted = torch.zeros_like(theirs) if theirs.grad is None else theirs.grad
        assert_close(ours.grad.to_dense(), wanted.to_dense() * factor, relative)


def digest(net: nn.Module) -> str:
    """A hash of all parameters' bits."""
    summary = hashlib.sha256()
    for parameter in net.parameters():
        summary.update(parameter.detach().contiguous().numpy().tobytes())
    return summary.hexdigest()


def assert_identical(hvd: Any, net: nn.Module) -> None:
    """All ranks hold the same bits."""
    digests = hvd.allgather_object(digest(net))
    assert len(set(digests)) == 1, digests


def train_step(optimizer: Any, net: nn.Module, data: tuple[torch.Tensor, torch.Tensor], **options: Any) -> None:
    """The usual three lines."""
    optimizer.zero_grad()
    loss_of(net, data, **options).backward()
    optimizer.step()


@contextlib.contextmanager
def expect(error: type[BaseException], *texts: str) -> Iterator[None]:
    """The block raises ``error`` whose message holds all ``texts``."""
    with pytest.raises(error) as caught:
        yield
    for text in texts:
        assert text in str(caught.value), f"{text!r} is not in {caught.value}"


@contextlib.contextmanager
def no_warnings() -> Iterator[None]:
    """Any warning in the block is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
