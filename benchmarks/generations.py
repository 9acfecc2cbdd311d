"""Time until ranks train on after a rank was killed, left or joined, and the cost of forming anew and of commits.

    python benchmarks/generations.py
    python benchmarks/generations.py --kills 2 --rounds 5       # a quick look

The ranks are forks of one process, which is also their launcher (tests/elastic/job.py), so no start of Python counts.
A kill is measured from SIGKILL until the last of the other ranks begins its next step. ``computing`` is the time since
the failed step began; for most of it a rank computes without looking at the other ranks. The state is sent only if some
ranks have applied the step in which other ranks failed. Joining is measured from the commit at which the old ranks
stop, until all ranks have the new rank's first step before them, with 164 MB of state. Steps with and without a commit
are timed in blocks that alternate.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import common
import torch
import torch._dynamo  # like the modules below, imported once here and not by each rank
from jobs import ROOT
from models import VOCABULARY, WordTransformer
from torch import nn
from torch.nn import functional

sys.path.insert(0, str(ROOT))

import hvdkit.torch as hvd
from hvdkit.engine.session import generations
from hvdkit.environments import elastic
from tests.elastic.job import ElasticJob, Rank, run

COMMIT_BLOCKS, COMMIT_STEPS = 12, 8
STEP_NAMES = {True: "a step with a commit", False: "a step without a commit"}
SETTLING_STEPS, STEPS = 3, 9  # of a generation: before those that count as later steps, and in all
WORDS = 16  # of a sample


def workload(is_large: bool) -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    """Return a model, and a function that computes its loss on a batch."""
    torch.manual_seed(0)
    if not is_large:
        model: nn.Module = nn.Sequential(
            nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
        )
        return model, lambda: model(torch.randn(8, 256)).square().mean()
    model, words = WordTransformer(), torch.randint(0, VOCABULARY, (1, WORDS))
    return model, lambda: functional.cross_entropy(model(words).flatten(0, 1), words.flatten())


def train(is_large: bool, rank: Rank) -> None:
    """Train in each generation, and report its first steps and its failure."""
    model, loss = workload(is_large)
    inner = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizer, version, failed = None, 0, False
    while True:
        generations.enter_next(rank, failed)
        if optimizer is None:
            optimizer = hvd.DistributedOptimizer(inner, model.named_parameters())
        versions = hvd.allgather(torch.tensor([version]), name="versions").tolist()
        if min(versions) < max(versions):  # some ranks have applied the step in which other ranks failed
            newest, version = versions.index(max(versions)), max(versions)
            hvd.broadcast_parameters(model.state_dict(), root_rank=newest)
            hvd.broadcast_optimizer_state(optimizer, root_rank=newest)
        began, seconds = time.monotonic(), []
        try:
            while True:
                step_began = time.monotonic()
                optimizer.zero_grad()
                loss().backward()
                optimizer.step()
                version += 1
                seconds.append(time.monotonic() - step_began)
                if len(seconds) == STEPS:
                    rank.send(began=began, first=seconds[0], later=statistics.median(seconds[SETTLING_STEPS:]))
        except hvd.HorovodInternalError:
            failed = True
            rank.send(noticed=time.monotonic(), computing=time.monotonic() - step_began)


def measure_kills(ranks: int, hosts: int, is_large: bool, kills: int) -> list[dict[str, float]]:
    """Kill one of ``ranks`` ranks ``kills`` times, each time in a new job. Return seconds of the slowest other rank."""
    rows = []
    for number in range(kills):
        job = ElasticJob(partial(train, is_large), places(ranks, hosts))
        job.form()
        job.reports()
        time.sleep(0.3)
        killed_at = time.monotonic()
        job.lose(number % ranks)
        failures = job.reports()
        job.form()
        reports = job.reports()
        rows.append(
            {
                "noticed": slowest(failures, "noticed") - killed_at,
                "computing": slowest(failures, "computing"),
                "next step begins": slowest(reports, "began") - killed_at,
                "first step": slowest(reports, "first"),
                "later steps": slowest(reports, "later"),
            }
        )
        job.end()
    return rows


def form_again(rank: Rank) -> None:
    """Enter generation after generation."""
    while True:
        began = time.monotonic()
        generations.enter_next(rank, failed=True)
        entered = time.monotonic()
        hvd.barrier()
        rank.send(forming=entered - began)
        rank.receive()


def measure_forming(ranks: int, hosts: int, rounds: int) -> list[dict[str, float]]:
    """Form generations of the same ranks, whose numbers rotate on one host. Return the seconds of the slowest rank."""
    job, rows = ElasticJob(form_again, places(ranks, hosts)), []
    for _ in range(rounds + 1):
        job.form()
        rows.append({"forming": slowest(job.reports(), "forming")})
        job.tell()
        if hosts == 1:
            job.workers.append(job.workers.pop(0))
    job.end()
    return rows[1:]


def train_elastic(rank: Rank) -> None:
    """Train under hvd.elastic.run with a commit in each step, and report when this rank stops and goes on."""
    elastic._launcher = rank
    hvd.init()
    model, loss = workload(is_large=True)
    inner = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(inner, model.named_parameters())
    state = hvd.elastic.TorchState(model, optimizer, batch=0)

    def step(commits: bool) -> float:
        began = time.monotonic()
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
        rank.facts["stopped"] = time.monotonic()
        if commits:
            state.commit()
        return time.monotonic() - began

    @hvd.elastic.run
    def train_on(state: Any) -> None:
        rank.send(began=time.monotonic())
        if rank.order.get("commits"):
            seconds: dict[bool, list[float]] = {False: [], True: []}
            for block in range(2 * COMMIT_BLOCKS):
                # The first steps after a block without commits copy the parameters.
                times = [step(bool(block % 2)) for _ in range(COMMIT_STEPS + 3)]
                seconds[bool(block % 2)] += times[3:]
            rank.send(**{name: statistics.median(seconds[commits]) for commits, name in STEP_NAMES.items()})
        while True:
            step(commits=True)

    train_on(state)


def measure_commits(ranks: int) -> list[dict[str, float]]:
    """Return the seconds of a step with a commit and without one, of each rank."""
    job = ElasticJob(train_elastic, places(ranks, 1))
    job.form(commits=True)
    job.reports()
    rows = [{name: row[name] for name in STEP_NAMES.values()} for row in job.reports()]
    job.end()
    return [{**row, "1000 x ratio": row[STEP_NAMES[True]] / row[STEP_NAMES[False]]} for row in rows]


def measure_changes(ranks: int, changes: int) -> list[dict[str, float]]:
    """Have a rank leave and another join ``changes`` times. Return seconds from the last commit until all train on."""
    job, rows = ElasticJob(train_elastic, places(ranks, 1)), []
    job.form()
    job.reports()
    for _ in range(changes):
        row = {}
        for name in ("leaving", "joining"):
            time.sleep(1.0)
            asked = {}
            if name == "joining":
                job.add("host0", ranks - 1)
                asked[job.workers[-1]] = job.workers[-1].receive()  # it is ready
            for worker in job.workers[: ranks - (name == "joining")]:
                worker.send(interrupt=True)
            asked |= {worker: worker.receive() for worker in job.workers if worker not in asked}
            stopped = max(ask["stopped"] for ask in asked.values() if "stopped" in ask)
            if name == "leaving":
                leaver = job.workers.pop()
                del asked[leaver]
                leaver.send(dismissal=True)
            job.form(asked=asked)
            row[name] = slowest(job.reports(), "began") - stopped
        rows.append(row)
    job.end()
    return rows


def places(ranks: int, hosts: int) -> list[tuple[str, int]]:
    each = -(-ranks // hosts)
    return [(f"host{rank // each}", rank % each) for rank in range(ranks)]


def slowest(reports: list[dict[str, Any]], key: str) -> float:
    return max(report[key] for report in reports)


def summary(rows: list[dict[str, float]]) -> dict[str, list[float]]:
    """Return median and maximum of each figure, in ms."""
    columns = {key: [1e3 * row[key] for row in rows] for key in rows[0]}
    return {key: [round(statistics.median(values), 1), round(max(values), 1)] for key, values in columns.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=12, help="ranks that are killed in each case")
    parser.add_argument("--rounds", type=int, default=40, help="generations that are formed anew in each case")
    common.add_output_flag(parser)
    args = common.parse(parser)
    torch.set_num_threads(1)
    results: dict[str, dict[str, list[float]]] = {}

    def add(name: str, rows: list[dict[str, float]]) -> None:
        results[name] = summary(rows)
        print(f"{name}: " + ", ".join(f"{key} {median} ({worst})" for key, (median, worst) in results[name].items()))

    for ranks, hosts in ((2, 1), (4, 1), (4, 2), (8, 1), (16, 1)):
        add(f"{ranks} ranks on {hosts} host{'s' * (hosts > 1)} form anew", measure_forming(ranks, hosts, args.rounds))
    for is_large, hosts in ((False, 1), (False, 2), (True, 1), (True, 2)):
        model = "20.5 M" if is_large else "0.4 M"
        where = f"{hosts} host{'s' * (hosts > 1)}"
        add(f"one of 4 ranks on {where} is killed, {model} parameters", measure_kills(4, hosts, is_large, args.kills))
    for ranks in (2, 4):
        add(f"{ranks} ranks", measure_commits(ranks))
        add(f"one of {ranks} ranks leaves, a new one joins with 164 MB", measure_changes(ranks, args.kills))
    common.save("generations", args, {"unit": "ms: median, worst", "cases": results})


if __name__ == "__main__":
    run(main)
