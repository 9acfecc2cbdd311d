"""Elastic jobs of programs of other forms: calls of run in turn, and an ElasticSampler.

``python -m tests.elastic.program_scenarios NAME``
"""

from __future__ import annotations

import os
import random
import sys
import time
from typing import Any

import torch

import hvdkit.torch as hvd
from hvdkit.environments import elastic
from tests.elastic.job import ElasticJob, Rank, run
from tests.elastic.state_scenarios import PLACES, grow


def rank_of_two_functions(rank: Rank) -> None:
    """Call run for two functions with states of their own, and fail in both."""
    elastic._launcher = rank  # type: ignore[assignment]
    hvd.init()
    results = []
    for name in ("first", "second"):
        state = hvd.elastic.TorchState(number=0, offer=rank.offer.rank)

        @hvd.elastic.run
        def count(state: Any, name: str) -> Any:
            while state.number < 6:
                if state.number == 3 and hvd.size() == (4 if name == "first" else 3) and hvd.rank() == 1:
                    os._exit(9)
                state.number += int(hvd.allreduce(torch.ones(1), op=hvd.Average, name=name))
                state.commit()
            return [name, state.number, state.offer]

        results.append(count(state, name))
    rank.send(results=results)


def two_functions() -> None:
    """A process may call run again, and the ranks stay connected; a failure in the second call is handled likewise."""
    job = ElasticJob(rank_of_two_functions, PLACES)
    job.form()
    for name in ("first", "second"):
        assert job.workers.pop(1).wait() == 9, name
        assert [ask["steps"] for ask in job.form()] == [3] * len(job.workers)
    assert [report["results"] for report in job.reports()] == [[["first", 6, 0], ["second", 6, 0]]] * 2


def rank_of_samples(rank: Rank) -> None:
    """Go through the samples of epochs by an ElasticSampler, until each epoch is done."""
    elastic._launcher = rank  # type: ignore[assignment]
    hvd.init()
    data = list(range(230))
    sampler = hvd.elastic.ElasticSampler(data, seed=5)
    state = hvd.elastic.TorchState(sampler=sampler, epoch=0, batch=0, seen=[[], [], []])

    @hvd.elastic.run
    def train(state: Any) -> None:
        rank.send(epoch=state.epoch)
        while state.epoch < 3:
            loader = torch.utils.data.DataLoader(data, batch_size=4, sampler=sampler)  # type: ignore[arg-type]
            for number, batch in enumerate(loader):
                for indices in hvd.allgather_object(batch.tolist()):
                    state.seen[state.epoch] += indices
                sampler.record_batch(number, 4)
                time.sleep(0.02)
                state.commit()
            state.epoch += 1
            sampler.set_epoch(state.epoch)
            state.commit()

    train(state)
    rank.send(seen=state.seen)


def samples() -> None:
    """Ranks are killed and added while epochs pass: each committed epoch has all samples, and repeats few."""
    choose = random.Random(3)
    job = ElasticJob(rank_of_samples, PLACES)
    job.form()
    epochs = [report["epoch"] for report in job.reports()]
    changes = 0
    while epochs[0] < 2:
        time.sleep(choose.uniform(0.02, 0.1))
        if len(job.workers) > 2:
            job.lose(choose.randrange(len(job.workers)))
        else:
            grow(job, 4)
        job.form()
        epochs = [report["epoch"] for report in job.reports()]
        assert len(set(epochs)) == 1
        changes += 1
    assert changes > 3
    seen = job.reports()[0]["seen"]
    assert [set(indices) for indices in seen] == [set(range(230))] * 3
    assert max(len(indices) for indices in seen) < 230 + 4  # fewer than there are ranks fill up the last share
    assert seen[0] != seen[1]


SCENARIOS = {"two functions": two_functions, "samples": samples}

if __name__ == "__main__":
    torch.set_num_threads(1)
    run(SCENARIOS[sys.argv[1]])
