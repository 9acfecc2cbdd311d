"""A training under hvd.elastic.run that its launcher disturbs, and which one process can replay to the same bits.

A batch is a pure function of its number and a rank.
"""

from __future__ import annotations

import functools
import hashlib
import os
import signal
import threading
from typing import Any

import torch
import torch._dynamo  # which optimizers load: not in each fork anew

import hvdkit.torch as hvd
from hvdkit.api import elastic as api
from hvdkit.api.transfer import send_state
from hvdkit.environments import elastic
from hvdkit.errors import HorovodInternalError, HostsUpdatedInterrupt
from tests.elastic.job import Rank

ENDLESS = 1 << 30


def new_training(rank: int) -> tuple[torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    torch.manual_seed(rank)
    model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.Tanh(), torch.nn.Linear(512, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=10, gamma=0.9)


def loss_of(model: torch.nn.Module, batch: int, rank: int) -> torch.Tensor:
    samples = torch.randn(4, 64, generator=torch.Generator().manual_seed(1000 * batch + rank))
    loss: torch.Tensor = (model(samples) - 1).square().mean()
    return loss


def replay(first: int, sizes: list[int]) -> torch.Tensor:
    """Train in one process what so many ranks have trained in each batch. Return what the optimizer has changed.

    ``first``: the offered rank of the process with whose parameters the job began.
    """
    model, optimizer, scheduler = new_training(first)
    parameters = list(model.parameters())
    for batch, size in enumerate(sizes):
        gradients = [torch.autograd.grad(loss_of(model, batch, rank), parameters) for rank in range(size)]
        for parameter, parts in zip(parameters, zip(*gradients, strict=True), strict=True):
            parameter.grad = functools.reduce(torch.add, parts) / size  # in the order of ranks, as hvdkit sums
        optimizer.step()
        scheduler.step()
    return contents(model, optimizer)


def contents(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """Return the parameters, their momentum and the learning rate as a vector."""
    momentum = [state["momentum_buffer"] for state in optimizer.state_dict()["state"].values()]
    rate = torch.tensor([optimizer.param_groups[0]["lr"]])
    return torch.cat([each.detach().flatten() for each in (*model.parameters(), *momentum, rate)])


class DisturbedState(hvd.elastic.TorchState):
    """A state whose operations fail as the order says that came with the last ticket."""

    def __init__(self, rank: Rank, *arguments: object, **named: object) -> None:
        object.__setattr__(self, "launcher", rank)
        object.__setattr__(self, "syncs", 0)
        super().__init__(*arguments, **named)

    def save(self) -> None:
        super().save()
        self.launcher.facts["batch"] = self.batch

    def send(self, content: object, root: int, receivers: list[int]) -> object:
        """Send the state, or die: the rank that sends it while it does so, another while it waits."""
        self.syncs += 1
        if self.launcher.order.get("dies_as") == hvd.rank():
            if hvd.rank() != root:
                os.kill(os.getpid(), signal.SIGKILL)
            content = Deadly()
        return send_state(content, root, receivers)

    def _take(self, content: object) -> None:
        super()._take(content)
        self.launcher.facts["batch"] = self.batch

    def restore(self) -> None:
        super().restore()
        self.launcher.facts["batch"] = self.batch

    def check_host_updates(self) -> None:
        """Check for updates, or fail where the other ranks are interrupted."""
        try:
            super().check_host_updates()
        except HostsUpdatedInterrupt as interrupt:
            if self.launcher.order.get("fails_check") == hvd.rank():
                raise HorovodInternalError("this check fails") from interrupt
            raise


class Deadly:
    """An object that kills the process which pickles it."""

    def __reduce__(self) -> tuple[object, ...]:
        os.kill(os.getpid(), signal.SIGKILL)
        return ()


class OwnSyncState(DisturbedState):
    """A state with its own way to send itself, as users write it."""

    def sync(self) -> None:
        """Synchronise the state, or die in the middle of it."""
        self.syncs += 1
        if self.launcher.order.get("dies_as") == hvd.rank():
            for name in ("scheduler", "model"):  # a part of what is sent, in the usual order
                self._handlers[name].sync()
            os.kill(os.getpid(), signal.SIGKILL)
        super().sync()
        self.launcher.facts["batch"] = self.batch


def rank_that_trains(
    rank: Rank,
    batches_per_commit: int = 1,
    kind: type[DisturbedState] = DisturbedState,
    compression: Any = hvd.Compression.none,
) -> None:
    """Train until a ticket comes with ``last``, the number of batches after which all ranks return."""
    elastic._launcher = rank  # type: ignore[assignment]
    hvd.init()
    assert (hvd.rank(), hvd.size()) == (rank.offer.rank, rank.offer.size)
    model, inner, scheduler = new_training(rank.offer.rank)  # rank 0 gives the others its own
    optimizer = hvd.DistributedOptimizer(inner, model.named_parameters(), compression=compression)
    state = kind(rank, model, optimizer, scheduler=scheduler, batch=0, sizes=[], first=-1)
    state.first = rank.offer.rank  # after the state has saved itself for the first time
    api.send_state = state.send
    resets: list[list[int]] = []

    def digest() -> str:
        return hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in model.parameters())).hexdigest()

    state.register_reset_callbacks([lambda: resets.append([hvd.rank(), hvd.size()])])

    @hvd.elastic.run
    def train(state: DisturbedState) -> None:
        rank.send(
            batch=state.batch, sizes=state.sizes, first=state.first, commits=state._version.commits, syncs=state.syncs,
            resets=resets, digest=digest(), held=[len(os.listdir("/proc/self/fd")), threading.active_count()],
        )  # fmt: skip
        while state.batch < rank.order.get("last", ENDLESS):
            if rank.order.get("dies") == [hvd.rank(), state.batch]:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            loss_of(model, state.batch, hvd.rank()).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            scheduler.step()
            state.sizes.append(hvd.size())
            state.batch += 1
            if state.batch % batches_per_commit == 0:
                state.commit()
            else:
                state.check_host_updates()

    train(state)
    is_first = hvd.rank() == 0
    hvd.shutdown()
    values = contents(model, inner)
    is_replayed = not is_first or torch.equal(values, replay(state.first, state.sizes))  # the others' bits are compared
    rank.send(digest=hashlib.sha256(values.numpy().tobytes()).hexdigest(), is_replayed=is_replayed, batch=state.batch)
