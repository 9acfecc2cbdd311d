"""Elastic jobs whose ranks come and go, each in a process of its own: ``python -m tests.elastic.scenarios NAME``."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import sys
import time
from dataclasses import replace
from typing import Any

import torch
import torch._dynamo  # as all that ranks would import, each for itself

import hvdkit.torch as hvd
from hvdkit.arena import ARENA
from hvdkit.engine.session import generations, runtime, sharing, watch
from hvdkit.engine.session.session import LEAVING
from hvdkit.environments.ticket import Report, Ticket
from hvdkit.errors import HorovodInternalError, PeerLostError
from hvdkit.transports.node import heartbeat, memory
from tests.elastic.job import Answer, ElasticJob, Rank, run
from tests.transports.shared import grown, held

ONE_HOST = [("here", slot) for slot in range(4)]
TWO_HOSTS = [("one", 0), ("one", 1), ("two", 0), ("two", 1)]


def check_sums() -> None:
    """Reduce, gather and broadcast small and large tensors with all ranks."""
    size, rank = hvd.size(), hvd.rank()
    for elements in (9, 300_000):
        total = hvd.allreduce(torch.full((elements,), rank + 1.0), op=hvd.Sum, name=f"sum of {elements}")
        assert bool((total == size * (size + 1) / 2).all())
    assert hvd.allgather(torch.tensor([rank]), name="ranks").tolist() == list(range(size))
    assert hvd.broadcast(torch.tensor([rank]), size - 1, name="last").item() == size - 1


def place() -> Answer:
    return {
        "rank": hvd.rank(), "size": hvd.size(), "local_rank": hvd.local_rank(), "local_size": hvd.local_size(),
        "cross_rank": hvd.cross_rank(), "cross_size": hvd.cross_size(),
    }  # fmt: skip


def rank_of_rounds(rank: Rank) -> None:
    """Enter a generation, check it and report, as often as the launcher wants."""
    failed = False
    held_between: list[Any] = []

    def next_ticket(address: tuple[str, int], report: Report) -> Ticket:
        held_between.append(held())  # after the generation before, of which nothing may be left
        return Rank.next_ticket(rank, address, report)

    rank.next_ticket = next_ticket  # type: ignore[method-assign]
    while True:
        generations.enter_next(rank, failed)
        check_sums()
        # The first generation leaves threads of libraries behind.
        rank.send(**place(), grown=grown(held_between[min(1, len(held_between) - 1)], held_between[-1]))
        order = rank.receive()
        failed = order.get("failed", False)
        if order.get("end"):
            hvd.shutdown()
            return


def rounds(places: list[tuple[str, int]]) -> None:
    """Ranks take each other's numbers in each generation; descriptors and threads do not grow."""
    job = ElasticJob(rank_of_rounds, places)
    per_host = 1 + max(slot for _, slot in places)
    for number in range(9):
        job.form()
        for rank, (report, worker) in enumerate(zip(job.reports(), job.workers, strict=True)):
            assert not report["grown"], report
            assert report["rank"] == rank
            assert (report["local_rank"], report["local_size"]) == (worker.slot, per_host)
        if number < 8:
            job.tell(failed=number % 2 == 0)
            job.workers.append(job.workers.pop(0))
    job.tell(end=True)
    assert [worker.wait() for worker in job.workers] == [0] * len(places)


def holes() -> None:
    """A slot stays with its process, a lost one leaves a hole, and a new process fills it; until one rank is left."""
    job = ElasticJob(rank_of_rounds, TWO_HOSTS)

    def form() -> list[list[Any]]:
        job.form()
        names = ("local_rank", "local_size", "cross_rank", "cross_size")
        return [[report[name] for name in names] for report in job.reports()]

    assert form() == [[0, 2, 0, 2], [1, 2, 0, 2], [0, 2, 1, 2], [1, 2, 1, 2]]
    job.lose(0)
    job.tell(failed=True)
    assert form() == [[1, 1, 0, 2], [0, 2, 0, 1], [1, 2, 1, 2]]
    job.tell(failed=False)
    job.add("one", 0)
    job.add("one", 5)
    assert form() == [[1, 3, 0, 2], [0, 2, 1, 2], [1, 2, 1, 2], [0, 3, 0, 2], [5, 3, 0, 1]]
    for _ in range(4):
        job.lose(0)
        job.tell(failed=True)
        form()
    job.tell(failed=False)
    job.add("one", 0)
    assert form() == [[5, 2, 0, 1], [0, 2, 0, 1]]
    job.end()


LARGE_GRADIENTS_BYTES = 4 * (64 * 4096 + 4096 * 4)  # of the model below, without its biases


def digest_of(model: torch.nn.Module) -> str:
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()


def rank_that_trains(rank: Rank) -> None:
    """Train, and tell the versions and hashes of the parameters after each failure and each new generation."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 4))
    inner = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizer, version, failed = None, 0, False
    while True:
        generations.enter_next(rank, failed)
        if optimizer is None:
            optimizer = hvd.DistributedOptimizer(inner, model.named_parameters())
        versions = hvd.allgather(torch.tensor([version]), name="versions").tolist()
        newest = versions.index(max(versions))
        if min(versions) < max(versions):
            hvd.broadcast_parameters(model.state_dict(), root_rank=newest)
            hvd.broadcast_optimizer_state(optimizer, root_rank=newest)
            version = max(versions)
        populated = ARENA._native.counts()[3]
        rank.send(version=version, digest=digest_of(model), versions=versions, populated=populated)
        try:
            while True:
                optimizer.zero_grad()
                batch = torch.randn(8, 64, generator=torch.Generator().manual_seed(1000 * version + hvd.rank()))
                model(batch).square().mean().backward()
                optimizer.step()
                version += 1
        except HorovodInternalError:
            rank.send(version=version, digest=digest_of(model))
            failed = True


def kills(places: list[tuple[str, int]]) -> None:
    """Ranks are killed at random moments; the others hold one of two versions, and train on with the newest."""
    choose = random.Random(1)
    job = ElasticJob(rank_that_trains, places)
    job.form()
    job.reports()
    for _ in range(12):
        time.sleep(choose.uniform(0.0, 0.05))
        job.lose(choose.randrange(len(job.workers)))
        failed = job.reports()
        versions = {report["version"] for report in failed}
        assert max(versions) - min(versions) <= 1, failed
        for version in versions:
            assert len({report["digest"] for report in failed if report["version"] == version}) == 1, failed
        if len(job.workers) == 2:  # others fill the slots again
            for host, slot in set(places) - {(worker.host, worker.slot) for worker in job.workers}:
                job.add(host, slot)
        job.form()
        begun = job.reports()
        assert len({(report["version"], report["digest"]) for report in begun}) == 1, begun
        assert begun[0]["version"] == max(versions)
        # Gradients of a failed step give their memory to those of the next, unless a thread still receives there.
        assert max(report["populated"] for report in begun) <= 2 * LARGE_GRADIENTS_BYTES, begun
    job.end()


def rank_that_fails(rank: Rank) -> None:
    """Leave with an error as rank 1; as another rank tell how that was noticed."""
    watch.DEPARTED_SECONDS = 1000.0  # the ranks would wait so long for late data
    generations.enter_next(rank)
    if hvd.rank() == 1:
        session = runtime.take_session()
        assert session is not None
        session.close(f"{LEAVING} with ValueError", 1)
        return
    try:
        hvd.allreduce(torch.ones(3), name="never")
    except PeerLostError as error:
        rank.send(text=str(error), lost=error.rank)
    generations.enter_next(rank, failed=True)
    check_sums()
    rank.send(**place())
    rank.receive()


def kills_over_two_networks() -> None:
    """Each rank has two addresses, and so two connections of Gloo to each other, both of which must be broken."""
    Rank.addresses = ["127.0.0.1", "127.0.0.1"]
    kills(TWO_HOSTS)


def failures() -> None:
    """A rank that leaves with an error is noticed at once, not only when its late data would have come."""
    for places in (ONE_HOST, TWO_HOSTS):
        job = ElasticJob(rank_that_fails, places)
        job.form()
        assert job.workers.pop(1).wait() == 0
        for report in job.reports():
            assert report["lost"] == 1
            assert "left the job: it called hvd.shutdown() or ended with ValueError" in report["text"]
        job.form()
        assert [report["size"] for report in job.reports()] == [3, 3, 3]
        job.tell()
        assert [worker.wait() for worker in job.workers] == [0, 0, 0]


def rank_that_dies_on_the_way(rank: Rank) -> None:
    """Enter generations; where the order says so, die when the memory is handed over, or when signs of life begin."""
    sharing.OBTAIN_SECONDS = heartbeat.CONNECTING_SECONDS = 300.0

    def die(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    next_ticket, gone = rank.next_ticket, []

    def lost_ranks() -> list[int]:
        if rank.receives_now():
            gone.extend(rank.receive()["gone"])
        return gone

    def obey(address: tuple[str, int], report: Report) -> Ticket:
        ticket = next_ticket(address, report)
        if "dies" in rank.order and ticket.rank == rank.order["dies"][0]:
            setattr({"fetch": memory, "_reach": heartbeat}[rank.order["dies"][1]], rank.order["dies"][1], die)
        gone.clear()
        return replace(ticket, lost_ranks=lost_ranks)

    rank.next_ticket = obey  # type: ignore[method-assign]
    failed = False
    while True:
        try:
            generations.enter_next(rank, failed)
            rank.send(**place())
            rank.receive()
            failed = False
        except PeerLostError:
            failed = True


def deaths_on_the_way() -> None:
    """Nobody waits for a rank that dies once all ranks are connected, and before they train."""
    os.environ |= {"HVDKIT_TIMEOUT_SECONDS": "2000", "HVDKIT_START_TIMEOUT_SECONDS": "2000"}
    for where in ("fetch", "_reach"):
        job = ElasticJob(rank_that_dies_on_the_way, TWO_HOSTS)
        job.form(dies=[3, where])
        job.workers.pop(3).wait()
        job.tell(gone=[3])
        job.form()
        assert [report["size"] for report in job.reports()] == [3, 3, 3]
        job.end()


def rank_of_sets(rank: Rank) -> None:
    """Use process sets that stay, and one that loses a member."""
    first, last = hvd.ProcessSet([0, 1]), hvd.ProcessSet([2, 3])
    generations.enter_next(rank)
    runtime.registered_process_sets()[:] = [first, last]
    generations.enter_next(rank)
    assert (first.process_set_id, last.process_set_id) == (1, 2)
    mine = first if first.included() else last
    assert hvd.allreduce(torch.ones(3), op=hvd.Sum, name="both", process_set=mine).tolist() == [2.0] * 3
    rank.send()
    rank.receive()
    generations.enter_next(rank, failed=True)
    assert last.ranks == [1, 2]
    if last.included():
        assert hvd.allreduce(torch.ones(3), op=hvd.Sum, name="two", process_set=last).tolist() == [2.0] * 3
    try:
        hvd.allreduce(torch.ones(3), process_set=first)
    except ValueError as error:
        rank.send(text=str(error))
    rank.receive()
    generations.enter_next(rank)
    assert last.process_set_id is None
    rank.send()
    rank.receive()


def rank_that_joins(rank: Rank) -> None:
    """Join a job that runs."""
    generations.enter_next(rank)
    rank.send()
    rank.receive()


def process_sets() -> None:
    """A set of which all members stay works on with their new ranks; another says that it has ended, and why.

    A new process knows none of the sets, so all of them end.
    """
    job = ElasticJob(rank_of_sets, ONE_HOST)
    job.form()
    job.form()
    job.reports()
    job.lose(0)
    job.tell()
    job.form()
    for report in job.reports():
        assert "has ended: ranks have left the job or joined it before generation 3" in report["text"]
    job.tell()
    job.add("here", 0, rank_that_joins)
    job.form()
    job.reports()
    job.end()


SCENARIOS = {
    "rounds on one host": lambda: rounds(ONE_HOST),
    "rounds on two hosts": lambda: rounds(TWO_HOSTS),
    "holes": holes,
    "kills on one host": lambda: kills(ONE_HOST),
    "kills on two hosts": lambda: kills(TWO_HOSTS),
    "kills over two networks": kills_over_two_networks,
    "failures": failures,
    "process sets": process_sets,
    "deaths on the way": deaths_on_the_way,
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    run(SCENARIOS[sys.argv[1]])
