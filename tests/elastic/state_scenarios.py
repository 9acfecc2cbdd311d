"""Elastic jobs under hvd.elastic.run, in which ranks die at any moment. ``python -m tests.elastic.state_scenarios NAME``.

A batch is a pure function of its number and a rank, so that one process can replay what the ranks have trained.
"""

from __future__ import annotations

import functools
import os
import random
import signal
import sys
import time
from typing import Any

import torch

import hvdkit.torch as hvd
from hvdkit.environments import elastic
from tests.elastic.job import Answer, ElasticJob, Rank, Worker, newness, run

PLACES = [("here", slot) for slot in range(4)]
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
    """Train in one process what so many ranks have trained in each batch. Return all that the optimizer keeps.

    ``first``: the offered rank of the process with whose parameters the job began.
    """
    model, optimizer, scheduler = new_training(first)
    for batch, size in enumerate(sizes):
        parameters = list(model.parameters())
        gradients = [torch.autograd.grad(loss_of(model, batch, rank), parameters) for rank in range(size)]
        for parameter, parts in zip(parameters, zip(*gradients, strict=True), strict=True):
            parameter.grad = functools.reduce(torch.add, parts) / size  # in the order of ranks, as hvdkit sums
        optimizer.step()
        scheduler.step()
    return contents(model, optimizer)


def contents(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """Return the parameters and their momentum as a vector."""
    momentum = [state["momentum_buffer"] for state in optimizer.state_dict()["state"].values()]
    return torch.cat([each.detach().flatten() for each in (*model.parameters(), *momentum)])


class FatalState(hvd.elastic.TorchState):
    """A state whose process dies while it is synchronised, if the last ticket came with ``dies_as`` and its rank."""

    def sync(self) -> None:
        rank = elastic._launcher
        assert isinstance(rank, Rank)
        if rank.order.get("dies_as") == hvd.rank():
            for name in ("scheduler", "model"):  # a part of what is sent, in the usual order
                self._handlers[name].sync()
            os.kill(os.getpid(), signal.SIGKILL)
        super().sync()


def rank_that_trains(rank: Rank, batches_per_commit: int = 1) -> None:
    """Train until a ticket comes with ``last``, the number of batches after which all ranks return."""
    elastic._launcher = rank  # type: ignore[assignment]
    hvd.init()
    assert (hvd.rank(), hvd.size()) == (rank.offer.rank, rank.offer.size)
    model, inner, scheduler = new_training(rank.offer.rank)  # rank 0 gives the others its own
    optimizer = hvd.DistributedOptimizer(inner, model.named_parameters())
    state = FatalState(model, optimizer, scheduler=scheduler, batch=0, sizes=[], first=rank.offer.rank)
    resets: list[list[int]] = []
    state.register_reset_callbacks([lambda: resets.append([hvd.rank(), hvd.size()])])

    @hvd.elastic.run
    def train(state: FatalState) -> None:
        rank.send(begins=state.batch, commits=state._commits, resets=resets[:], first=state.first, sizes=state.sizes)
        while state.batch < rank.order.get("last", ENDLESS):
            optimizer.zero_grad()
            loss_of(model, state.batch, hvd.rank()).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            scheduler.step()
            state.sizes.append(hvd.size())
            state.batch += 1
            if state.batch % batches_per_commit == 0:
                state.commit()

    train(state)
    hvd.shutdown()
    values = contents(model, inner)
    rank.send(
        bits=values.view(torch.int32).tolist(), sizes=state.sizes, learning_rate=inner.param_groups[0]["lr"],
        is_replayed=torch.equal(values, replay(state.first, state.sizes)),
    )  # fmt: skip


def begin(job: ElasticJob, **order: Any) -> tuple[list[Answer], list[Answer]]:
    """Form a generation. Return what its ranks asked, and what they told when they began to train."""
    asked = job.form(**order)
    return asked, job.reports()


def grow(job: ElasticJob, slot: int) -> None:
    """Add a worker, and interrupt the others."""
    job.add("here", slot)
    for worker in job.workers[:-1]:
        worker.send(interrupt=True)


def finish(job: ElasticJob) -> list[Answer]:
    """Have all ranks return, and compare what they hold."""
    for worker in job.workers:
        worker.send(interrupt=True)
    _, begun = begin(job, last=0)
    check(begun)
    ends = job.reports()
    assert [worker.wait() for worker in job.workers] == [0] * len(ends)
    assert [end["bits"] == ends[0]["bits"] for end in ends] == [True] * len(ends)
    assert [end["sizes"] == ends[0]["sizes"] for end in ends] == [True] * len(ends)
    assert [end["is_replayed"] for end in ends] == [True] * len(ends)
    assert ends[0]["sizes"], "nothing was trained"
    assert abs(ends[0]["learning_rate"] - 0.02 * 0.9 ** (len(ends[0]["sizes"]) // 10)) < 1e-9
    return ends


def check(begun: list[Answer]) -> None:
    """Compare what ranks told when they began: all have the state of one, with its attributes."""
    for fact in ("begins", "commits", "first", "sizes"):
        assert [each[fact] == begun[0][fact] for each in begun] == [True] * len(begun), (fact, begun)


def kills(batches_per_commit: int) -> None:
    """Ranks are killed at random moments; no commit is lost, and the result is that of a replay."""
    choose = random.Random(batches_per_commit)
    job = ElasticJob(lambda rank: rank_that_trains(rank, batches_per_commit), PLACES)
    begin(job)
    for _ in range(15):
        time.sleep(choose.uniform(0.0, 0.05))
        job.lose(choose.randrange(len(job.workers)))
        asked, begun = begin(job)
        check(begun)
        newest = max(map(newness, asked))
        assert newest - min(map(newness, asked)) <= 1, asked
        assert begun[0]["commits"] == newest
        assert begun[0]["begins"] >= batches_per_commit * newest
        assert [each["resets"][-1] for each in begun] == [[rank, len(begun)] for rank in range(len(begun))]
        if len(job.workers) == 2:
            for slot in {0, 1, 2, 3} - {worker.slot for worker in job.workers}:
                grow(job, slot)
            _, begun = begin(job)
            check(begun)
            assert len(begun) == 4
    finish(job)


def deaths_while_forming() -> None:
    """Ranks die while they connect to the others, which form without them, without a lost batch."""
    job = ElasticJob(rank_that_trains, PLACES)
    begin(job)
    for index in (0, 1, 2, 3, 2):
        time.sleep(0.05)
        if len(job.workers) < 4:
            grow(job, 9)
        for worker in job.workers:
            worker.send(interrupt=True)
        asked = job.form(killed=job.workers[min(index, len(job.workers) - 1)])
        asked_again, begun = begin(job)
        check(begun)
        assert begun[0]["commits"] == max(map(newness, asked)) == max(map(newness, asked_again))
    finish(job)


def deaths_while_synchronising() -> None:
    """The rank that sends the state dies, or a new one that receives it: others go on from the newest commit."""
    job = ElasticJob(rank_that_trains, PLACES[:3])
    begin(job)
    for dies_as in (0, 3, 1, 0):
        time.sleep(0.05)
        while len(job.workers) < 4:
            grow(job, 9)
        asked = job.form(dies_as=dies_as)
        job.workers.pop(dies_as).wait()
        asked_again, begun = begin(job)
        check(begun)
        assert begun[0]["commits"] == max(map(newness, asked)) == max(map(newness, asked_again))
        assert begun[0]["first"] == 0
    finish(job)


def deaths_in_the_first_generation() -> None:
    """Where a rank dies before the state was ever synchronised, the job begins with the whole state of another."""
    for dies_as in (0, 1, 3):
        job = ElasticJob(rank_that_trains, PLACES)
        job.form(dies_as=dies_as)
        job.workers.pop(dies_as).wait()
        asked, begun = begin(job)
        check(begun)
        assert [ask["steps"] for ask in asked] == [None] * 3
        assert begun[0]["first"] == (1 if dies_as == 0 else 0)
        time.sleep(0.05)
        finish(job)


def leave() -> None:
    """Ranks that are not needed end with success at a commit to which one interrupt leads, and no batch is lost."""
    job = ElasticJob(rank_that_trains, PLACES)
    begin(job)
    for index in (1, 0, 1):
        time.sleep(0.05)
        job.workers[-1].send(interrupt=True)  # the others do not know of it
        asked = {worker: worker.receive() for worker in job.workers}
        assert len({ask["steps"] for ask in asked.values()}) == 1
        leaving = job.workers.pop(index)
        leaving.send(dismissal=True)
        assert leaving.wait() == 0
        _, begun = begin(job, asked=asked)
        check(begun)
        assert {each["begins"] for each in begun} == {ask["steps"] for ask in asked.values()}
        assert [each["resets"][-1] for each in begun] == [[rank, len(begun)] for rank in range(len(begun))]
    finish(job)


def callbacks() -> None:
    """A new rank calls the callbacks where its place is another than before, also if that failed meanwhile."""
    job = ElasticJob(rank_that_trains, PLACES[:3])
    _, begun = begin(job)
    assert [each["resets"] for each in begun] == [[]] * 3  # each has the place that it was offered
    grow(job, 3)
    new = job.workers[-1]
    job.lose(2)
    job.form(dies_as=1)
    job.workers.pop(1).wait()
    while len(job.workers) < 4:  # so that the new rank gets the place that it was offered
        job.add("here", 8)
        job.workers.insert(1, job.workers.pop())
    assert job.workers.index(new) == 3
    _, begun = begin(job)
    assert [each["resets"] for each in begun][0] == [[0, 3], [0, 4]]
    assert [each["resets"] for each in begun][3] == [[2, 3], [3, 4]]
    finish(job)


SCENARIOS = {
    "kills with a commit in each batch": lambda: kills(1),
    "kills with a commit in each third batch": lambda: kills(3),
    "deaths while forming": deaths_while_forming,
    "deaths while synchronising": deaths_while_synchronising,
    "deaths in the first generation": deaths_in_the_first_generation,
    "leave": leave,
    "callbacks": callbacks,
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    run(SCENARIOS[sys.argv[1]])
