"""Elastic jobs under hvd.elastic.run, in which ranks die. ``python -m tests.elastic.state_scenarios NAME``."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

import hvdkit
import hvdkit.torch as hvd
from hvdkit.environments import elastic
from tests.elastic.job import Answer, ElasticJob, Rank, Worker, newness, run
from tests.elastic.training import DisturbedState, OwnSyncState, rank_that_trains

PLACES = [("here", slot) for slot in range(4)]


def begin(job: ElasticJob, **order: Any) -> tuple[list[Answer], list[Answer]]:
    """Form a generation, all of whose ranks have the same state. Return what they asked and told."""
    asked = job.form(**order)
    begun = job.reports()
    for fact in ("batch", "commits", "first", "sizes", "digest"):
        assert [each[fact] == begun[0][fact] for each in begun] == [True] * len(begun), (fact, begun)
    return asked, begun


def grow(job: ElasticJob, size: int) -> None:
    """Add workers up to ``size``, and interrupt the others."""
    for worker in job.workers:
        worker.send(interrupt=True)
    while len(job.workers) < size:
        job.add("here", min(set(range(9)) - {worker.slot for worker in job.workers}))


def newest_batch(asked: Iterable[Answer]) -> int:
    """Return the batch of the newest commit that any worker has."""
    return int(max(asked, key=newness)["batch"])


def finish(job: ElasticJob) -> list[Answer]:
    """Have all ranks return. They hold the same bits, which are those of a replay."""
    for worker in job.workers:
        worker.send(interrupt=True)
    begin(job, last=0)
    ends = job.reports()
    assert [worker.wait() for worker in job.workers] == [0] * len(ends)
    assert len({end["digest"] for end in ends}) == 1
    assert [end["is_replayed"] for end in ends] == [True] * len(ends)
    assert ends[0]["batch"] > 0
    return ends


def kills(batches_per_commit: int) -> None:
    """Ranks are killed at random moments; no commit is lost, and the result is that of a replay."""
    choose = random.Random(batches_per_commit)
    job = ElasticJob(lambda rank: rank_that_trains(rank, batches_per_commit), PLACES)
    begin(job)
    for _ in range(15):
        time.sleep(choose.uniform(0.0, 0.05))
        job.lose(choose.randrange(len(job.workers)))
        asked, begun = begin(job)
        commits = [newness(ask) for ask in asked]
        assert max(commits) - min(commits) <= 1
        assert (begun[0]["commits"], begun[0]["batch"]) == (max(commits), newest_batch(asked))
        assert [each["resets"][-1] for each in begun] == [[rank, len(begun)] for rank in range(len(begun))]
        if len(job.workers) == 2:
            grow(job, 4)
            begin(job)
    finish(job)


def transfers() -> None:
    """The state is sent where a rank lacks it, and otherwise not: after a failure all have the same commit."""
    job = ElasticJob(rank_that_trains, PLACES)
    _, begun = begin(job, dies=[1, 5])
    assert [each["syncs"] for each in begun] == [1] * 4
    job.workers.pop(1).wait()
    asked, begun = begin(job)
    assert [ask["steps"] for ask in asked] == [5] * 3
    assert [ask["failed"] for ask in asked] == [True] * 3
    assert [(each["syncs"], each["batch"]) for each in begun] == [(1, 5)] * 3
    grow(job, 4)
    _, begun = begin(job)
    assert [each["syncs"] for each in begun] == [2, 2, 2, 1]
    finish(job)


def random_events(count: int, compression: Any) -> None:
    """Ranks die, leave and join in any order; no commit is lost, and a process that saw all of it holds no more."""
    os.environ["HVDKIT_TIMEOUT_SECONDS"] = "1"  # after which rank 0 misses a rank that has never connected
    choose = random.Random(count)
    job = ElasticJob(lambda rank: rank_that_trains(rank, compression=compression), PLACES)
    begin(job)
    oldest, held = job.workers[0], []
    for _ in range(count):
        time.sleep(choose.uniform(0.0, 0.03))
        asked: dict[Worker, Answer] | None = None
        others = [worker for worker in job.workers if worker is not oldest]
        event = choose.choice(["kill", "leave", "die while forming"]) if len(others) > 1 else "join"
        if event == "join":
            grow(job, choose.randrange(3, 6))
        elif event == "kill":
            job.lose(job.workers.index(choose.choice(others)))
        else:
            job.workers[0].send(interrupt=True)
            asked = {worker: worker.receive() for worker in job.workers}
            leaver = choose.choice(others)
            if event == "leave":
                job.workers.remove(leaver)
                del asked[leaver]
                leaver.send(dismissal=True)
                assert leaver.wait() == 0
            else:
                job.form(killed=leaver, asked=asked)
                asked = None
        told, begun = begin(job, asked=asked)
        assert begun[0]["batch"] == newest_batch(told)
        held.append(begun[job.workers.index(oldest)]["held"])
    settled, last = held[count // 3], held[-1]
    assert all(now <= before + 2 for before, now in zip(settled, last, strict=True)), (settled, last)
    job.end()


def deaths_while_forming() -> None:
    """Ranks die while they connect to the others, which form without them, without a lost commit."""
    os.environ["HVDKIT_TIMEOUT_SECONDS"] = "1"  # after which rank 0 misses a rank that has never connected
    job = ElasticJob(rank_that_trains, PLACES)
    begin(job)
    for index in (0, 1, 2, 3, 2):
        time.sleep(0.05)
        grow(job, 4)
        asked = job.form(killed=job.workers[index])
        _, begun = begin(job)
        assert begun[0]["batch"] == newest_batch(asked)
    finish(job)


def deaths_while_synchronising(batches_per_commit: int, kind: type[DisturbedState] = DisturbedState) -> None:
    """The rank that sends the state dies, or a new one that receives it: others go on where they were."""
    job = ElasticJob(lambda rank: rank_that_trains(rank, batches_per_commit, kind), PLACES[:3])
    begin(job)
    for index in (0, 3, 1, 0):
        time.sleep(0.05)
        grow(job, 4)
        asked = job.form(dies_as=index)
        job.workers.pop(index).wait()
        _, begun = begin(job)
        assert (begun[0]["batch"], begun[0]["first"]) == (newest_batch(asked), 0)
        assert begun[0]["batch"] > 0
    finish(job)


def deaths_in_the_first_generation() -> None:
    """Where a rank dies before all have the same state, the job begins with the whole state of another."""
    for index in (0, 1, 3):
        job = ElasticJob(rank_that_trains, PLACES)
        job.form(dies_as=index)
        job.workers.pop(index).wait()
        asked, begun = begin(job)
        assert [ask["steps"] for ask in asked] == [None] * 3
        assert begun[0]["first"] == (1 if index == 0 else 0)
        time.sleep(0.05)
        finish(job)


def checks(failing: int) -> None:
    """A check for updates interrupts all ranks but one, on which it fails: all go on with the same state."""
    job = ElasticJob(lambda rank: rank_that_trains(rank, batches_per_commit=1000), PLACES)
    begin(job, fails_check=failing)
    time.sleep(0.2)
    job.workers[2].send(interrupt=True)  # the others do not hear of it
    asked, begun = begin(job)
    assert [ask["failed"] for ask in asked] == [rank == failing for rank in range(4)]
    assert [ask["steps"] for ask in asked] == [0] * 4
    assert asked[failing]["batch"] == 0  # which returned to its last commit
    assert begun[0]["batch"] == asked[1 - failing]["batch"] > 0
    time.sleep(0.1)
    finish(job)


def rank_of_samples(rank: Rank) -> None:
    """Train on each sample of an order once. A rank dies directly behind a step, if the order says so.

    Between step and commit the loss is reduced, in which the others fail then. The parameter counts steps.
    """
    elastic._launcher = rank  # type: ignore[assignment]
    hvd.init()
    counter = torch.nn.Parameter(torch.zeros(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([counter], lr=1.0), [("counter", counter)])
    sampler = hvd.elastic.ElasticSampler(range(1000), exact=True, batch_size=2)
    state = hvd.elastic.TorchState(torch.nn.ParameterList([counter]), optimizer, sampler=sampler)
    seen: list[list[int]] = []  # the samples of each step since the generation began

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        rank.send(steps=-int(counter.item()), done=sampler.processed_num, seen=seen)
        seen.clear()
        order = iter(sampler)
        while not rank.order.get("ends"):
            seen.append([next(order), next(order)])
            optimizer.zero_grad()
            counter.sum().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if rank.order["dies"] == [hvd.rank(), -int(counter.item())]:
                os.kill(os.getpid(), signal.SIGKILL)
            hvd.allreduce(torch.ones(1), name="loss")
            state.commit()

    train(state)


def failures_behind_a_step() -> None:
    """A step that was applied and not committed stays, with its place in the data: no sample is lost or repeated."""
    job = ElasticJob(rank_of_samples, PLACES)
    order = list(range(1000))
    random.Random(0).shuffle(order)
    size, done, steps = 4, 0, 0
    for dying, last in ((2, 7), (0, 19)):
        job.form(dies=[dying, last])
        assert [(each["steps"], each["done"]) for each in job.reports()] == [(steps, done)] * size
        job.workers.pop(dying).wait()
        begins = [done + number * 2 * size for number in range(last - steps)]
        done, steps = begins[-1] + 2 * size, last
        # Rank 1 of either generation survives, and is rank 1 or 0 of the next one.
        expected = [[order[begin + 1], order[begin + size + 1]] for begin in begins]
        size -= 1
        job.form(ends=True) if size == 2 else None
    ends = job.reports()
    assert [(each["steps"], each["done"]) for each in ends] == [(steps, done)] * size
    assert ends[0]["seen"] == expected
    assert [worker.wait() for worker in job.workers] == [0, 0]


def rank_that_compresses(rank: Rank) -> None:
    """Train with top-k; tell with each question the sums of what was sent, is kept here, and was computed here."""
    elastic._launcher = rank  # type: ignore[assignment]
    hvd.init()
    weights = torch.nn.Parameter(torch.zeros(4096))
    codec = hvd.Compression.topk(0.01, compress="everywhere")
    plain = torch.optim.SGD([weights], lr=1.0)
    optimizer = hvd.DistributedOptimizer(plain, [("weights", weights)], compression={"*": codec}, op=hvd.Sum)
    state = hvd.elastic.TorchState(torch.nn.ParameterList([weights]), optimizer, batch=0)
    rank.facts |= {"computed": 0.0, "kept": 0.0, "sent": 0.0}

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        while True:
            gradient = torch.randn(4096, generator=torch.Generator().manual_seed(100 * state.batch + hvd.rank()))
            optimizer.zero_grad()
            (weights * gradient).sum().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            state.batch += 1
            kept = optimizer.state_dict()["compression"]["kept"]["weights"].values()
            rank.facts["kept"] = sum(part.double().sum().item() for part in kept)
            rank.facts["sent"] = -weights.detach().double().sum().item()
            rank.facts["computed"] += gradient.double().sum().item()
            state.commit()

    train(state)


def residuals() -> None:
    """A rank that leaves gives what it has not sent to the others: nothing of any gradient is lost."""
    job, gone = ElasticJob(rank_that_compresses, PLACES), 0.0
    job.form()
    for leaving in (0, 2, 1):
        time.sleep(0.2)
        job.workers[-1].send(interrupt=True)
        asked = {worker: worker.receive() for worker in job.workers}
        sent, total = asked[job.workers[0]]["sent"], gone + sum(each["computed"] for each in asked.values())
        kept = [each["kept"] for each in asked.values()]
        assert abs(total - sent - sum(kept)) < 0.5  # rounding of float32
        worker = job.workers.pop(leaving)
        gone += asked.pop(worker)["computed"]
        worker.send(dismissal=True)
        assert worker.wait() == 0
        job.form(asked=asked)
    job.end()


def residuals_of_survivors() -> None:
    """A rank is killed: its residuals are lost, and those of the others, which have other numbers then, are not."""
    job = ElasticJob(rank_that_compresses, PLACES)
    job.form()
    time.sleep(0.2)
    job.lose(0)
    asked = job.form()
    # What they computed in steps that failed is no part of it: it is told at commits.
    missing = sum(each["computed"] - each["kept"] for each in asked) - asked[0]["sent"]
    time.sleep(0.2)
    job.workers[0].send(interrupt=True)
    now = [worker.receive() for worker in job.workers]
    assert now[0]["sent"] != asked[0]["sent"]
    assert abs(sum(each["computed"] - each["kept"] for each in now) - now[0]["sent"] - missing) < 0.5
    job.end()


def leave() -> None:
    """Ranks that are not needed end with success at the commit to which an interrupt of any rank leads."""
    job = ElasticJob(rank_that_trains, PLACES)
    begin(job)
    for index in (1, 0, 1):
        time.sleep(0.05)
        job.workers[-1].send(interrupt=True)  # the others do not hear of it
        asked = {worker: worker.receive() for worker in job.workers}
        assert len({ask["steps"] for ask in asked.values()}) == 1
        assert not any(ask["failed"] for ask in asked.values())
        leaving = job.workers.pop(index)
        leaving.send(dismissal=True)
        assert leaving.wait() == 0
        _, begun = begin(job, asked=asked)
        assert {each["batch"] for each in begun} == {ask["batch"] for ask in asked.values()}
        assert [each["resets"][-1] for each in begun] == [[rank, len(begun)] for rank in range(len(begun))]
    finish(job)


def callbacks() -> None:
    """A new rank calls the callbacks where its place is another than before, also if a generation failed meanwhile."""
    job = ElasticJob(rank_that_trains, PLACES[:3])
    _, begun = begin(job)
    assert [each["resets"] for each in begun] == [[]] * 3  # each has the place that it was offered
    grow(job, 4)
    new = job.workers[-1]
    job.lose(2)
    job.form(dies_as=1)
    job.workers.pop(1).wait()
    for slot in (1, 2):  # so that the new rank gets the place that it was offered
        job.add("here", slot)
        job.workers.insert(1, job.workers.pop())
    assert job.workers.index(new) == 3
    _, begun = begin(job)
    assert begun[0]["resets"] == [[0, 3], [0, 4]]
    assert begun[3]["resets"] == [[2, 3], [3, 4]]
    finish(job)


def rank_of_another_version(rank: Rank) -> None:
    """Join with another version of hvdkit."""
    hvdkit.__version__ = "0"
    rank_that_trains(rank)


def versions() -> None:
    """A new process of another version does not end the others."""
    job = ElasticJob(rank_that_trains, PLACES[:2])
    begin(job)
    job.add("here", 2, rank_of_another_version)
    for worker in job.workers[:2]:
        worker.send(interrupt=True)
    asked = job.form()
    for worker in job.workers[:2]:
        worker_asked = worker.receive()
        assert worker_asked["failed"]
        assert worker_asked["steps"] == newness(asked[0])
        asked.append(worker_asked)
    job.lose(2)
    _, begun = begin(job, asked=dict(zip(job.workers, asked[3:], strict=True)))
    assert begun[0]["batch"] == newest_batch(asked)
    finish(job)


TOPK = {"*": hvd.Compression.topk(0.05, compress="everywhere")}
SCENARIOS: dict[str, Callable[[], None]] = {
    "15 random events": lambda: random_events(15, hvd.Compression.none),
    "15 random events with top-k": lambda: random_events(15, TOPK),
    "150 random events": lambda: random_events(150, hvd.Compression.none),
    "150 random events with top-k": lambda: random_events(150, TOPK),
    "kills with a commit in each batch": lambda: kills(1),
    "kills with a commit in each third batch": lambda: kills(3),
    "transfers": transfers,
    "deaths while forming": deaths_while_forming,
    "deaths while synchronising": lambda: deaths_while_synchronising(1),
    "deaths while synchronising without a commit": lambda: deaths_while_synchronising(1000),
    "deaths while synchronising in a user's way": lambda: deaths_while_synchronising(1, OwnSyncState),
    "deaths in the first generation": deaths_in_the_first_generation,
    "a check that fails on rank 0": lambda: checks(0),
    "a check that fails on rank 1": lambda: checks(1),
    "failures behind a step": failures_behind_a_step,
    "residuals": residuals,
    "residuals of survivors": residuals_of_survivors,
    "leave": leave,
    "callbacks": callbacks,
    "versions": versions,
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    run(SCENARIOS[sys.argv[1]])
