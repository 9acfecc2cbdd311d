"""Races that are provoked: late work, memory that is used again, streams that overtake each other.

Each probe is first run with a safeguard taken away, and must find wrong sums then; it then finds right ones with it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from hvdkit.engine.session import runtime
from hvdkit.transports.gpu import streams
from tests.gpu import card
from tests.ranks import Skip

ELEMENTS = 4_000_000
TURNS = 4
pytestmark = card.on_card(2)


@contextlib.contextmanager
def changed_launches(*, waits: bool, late: bool) -> Iterator[None]:
    """Let launches not wait for the work that makes their inputs, or begin late, as behind a long collective."""
    real = streams.CudaStream.launch

    def launch(self, device, after, tensors, work):
        def late_work(wait):
            card.keep_busy(4 * card.BUSY_CYCLES)
            work(wait)

        return real(self, device, after if waits else [], tensors, late_work if late else work)

    streams.CudaStream.launch = launch
    try:
        yield
    finally:
        streams.CudaStream.launch = real


class Model(torch.nn.Module):
    """A large weight whose gradient is a number, late on the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(ELEMENTS, device=card.DEVICE))

    def forward(self, number: float) -> torch.Tensor:
        return (self.weight * number).sum()


def gradients_with_late_work(hvd) -> list[float]:
    """Return the errors of the sums of a few steps, whose gradients are each made behind a long kernel."""
    model = Model()
    sgd = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters(), op=hvd.Sum)
    wrong = []

    def late(gradient: torch.Tensor) -> torch.Tensor:
        card.keep_busy()
        return gradient * 1.0

    model.weight.register_hook(late)
    for turn in range(TURNS):
        optimizer.zero_grad()
        model(1.0 + hvd.rank() + turn).backward()
        optimizer.synchronize()
        right = float(sum(1 + rank + turn for rank in range(hvd.size())))
        wrong.append((model.weight.grad - right).abs().max().item())
        with optimizer.skip_synchronize():
            optimizer.step()
    assert list(runtime.engine().lanes.values())[-1].on_device
    return wrong


def test_a_gradient_that_is_late_is_waited_for(hvd):
    card.only_on_a_gpu()
    with changed_launches(waits=False, late=False):
        errors = gradients_with_late_work(hvd)
    assert any(hvd.allgather_object(max(errors))), "the probe does not find sums of gradients that are not there yet"
    assert gradients_with_late_work(hvd) == [0.0] * TURNS


def test_memory_in_use_is_not_given_to_others(hvd):
    """A tensor that is reduced in place, and of which nobody knows any more."""
    card.only_on_a_gpu()
    if card.WAY == "host":
        raise Skip("operations by name wait for their copies to the host")
    with changed_launches(waits=True, late=True):
        for turn in range(TURNS):
            hvd.allreduce_async_(torch.full((ELEMENTS,), 1.0, device=card.DEVICE), op=hvd.Sum, name=f"reused.{turn}")
            others = [torch.full((ELEMENTS,), -7.0, device=card.DEVICE) for _ in range(6)]
            hvd.allreduce(torch.ones(1, device=card.DEVICE), name=f"behind it.{turn}")
            torch.cuda.synchronize()
            assert all(other.eq(-7.0).all() for other in others), turn


def test_results_are_there_on_any_stream(hvd):
    """A result is read on a stream that knows nothing of the one on which it was asked for."""
    card.only_on_a_gpu()
    if card.WAY == "host":
        raise Skip("operations by name wait for their copies to the host")
    other = torch.cuda.Stream()
    with changed_launches(waits=True, late=True):
        for turn in range(TURNS):
            tensor = torch.full((ELEMENTS,), 1.0 + hvd.rank() + turn, device=card.DEVICE)
            hvd.allreduce_(tensor, op=hvd.Sum, name=f"any.{turn}")
            with torch.cuda.stream(other):
                low, high = tensor.min().item(), tensor.max().item()
            right = float(sum(1 + rank + turn for rank in range(hvd.size())))
            assert (low, high) == (right, right), (turn, low, high)


def test_steps_follow_each_other_without_a_wait(hvd):
    """The next step's gradients are made while nobody has looked at the last step's results."""
    model = Model()
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters(), op=hvd.Sum)
    for turn in range(20):
        optimizer.zero_grad()
        if turn % 3 == 0:
            card.keep_busy()
        model(float(turn + hvd.rank())).backward()
        optimizer.step()
    right = -float(sum(turn + rank for turn in range(20) for rank in range(hvd.size())))
    assert model.weight.detach().eq(right).all(), (model.weight[0].item(), right)
