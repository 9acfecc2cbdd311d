"""A rank that dies, stops or falls behind in the middle of a pass through shared memory, where others need its part."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest

from tests.ranks import TORCH, start_ranks
from tests.transports.shared import needs_memory_files, needs_native

pytestmark = [needs_native, needs_memory_files]

WORKER = [sys.executable, "-m", "tests.faults.mid_pass"]
JOB_SECONDS = 90
TIMEOUT_SECONDS = 3
# What is asked for is 1 s on a node, and 2 s after the timeout; machines that run tests may be slow, and run others.
# A rank that nobody missed would be noticed at the timeout, which is 60 s for one that is killed.
KILLED_WITHIN_SECONDS = {0: 15, 2: 30}  # by rank: on its node, and elsewhere
STOPPED_WITHIN_SECONDS = TIMEOUT_SECONDS + 12


def output_of(scenario: str, ranks: int, transport: str, timeout_seconds: float) -> str:
    """What all ranks printed once those have ended that can."""
    processes = start_ranks(
        [*WORKER, scenario],
        ranks,
        transport,
        per_node=2,
        preload=TORCH,
        HVDKIT_TIMEOUT_SECONDS=str(timeout_seconds),
        HOROVOD_FUSION_THRESHOLD=str(1 << 20),  # many operations, of which few are in flight
    )
    stuck = [processes[1]] if transport == "torch" and scenario == "stopped" else []
    deadline = time.monotonic() + JOB_SECONDS
    outputs = []
    try:
        for process in [one for one in processes if one not in stuck]:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, deadline - time.monotonic()))
    finally:
        for process in processes:
            late = process not in stuck and process.poll() is None
            process.kill()
            outputs.append(process.communicate()[0] + ("(killed: ran past its time limit)\n" if late else ""))
    output = "\n".join(outputs)
    for _, stopped in struck(output):
        with suppress(ProcessLookupError):
            os.kill(stopped, signal.SIGKILL)
    return output


def struck(output: str) -> list[tuple[float, int]]:
    """When rank 1 misbehaved, and its process."""
    return [(float(at), int(process)) for at, process in re.findall(r"STRIKES ([\d.]+) (\d+)", output)]


def noticed(output: str) -> dict[int, float]:
    """By rank, how long after rank 1 misbehaved it got an error, which named rank 1."""
    ((strike, _),) = struck(output)
    seconds = {}
    for rank, at, text in re.findall(r"RANK (\d) NOTICED ([\d.]+) (.*)", output):
        if rank == "1":  # mpirun wakes a stopped rank to end it
            continue
        assert "rank 1" in text, output
        seconds[int(rank)] = float(at) - strike
    return seconds


def kept_what_they_had(output: str) -> list[int]:
    """The ranks whose weights and inputs were as before the step or call that raised."""
    return [rank for rank in (0, 2) if f"RANK {rank} KEPT" in output]


@pytest.mark.essential(transport="torch")
@pytest.mark.parametrize("ranks", [2, 3])  # two are one node, a third one is on another
@pytest.mark.parametrize(("scenario", "timeout_seconds"), [("killed", 60), ("stopped", TIMEOUT_SECONDS)])
def test_the_others_learn_that_a_rank_was_killed_or_stopped(scenario, timeout_seconds, ranks, transport):
    output = output_of(scenario, ranks, transport, timeout_seconds)
    assert len(struck(output)) == 1, output
    assert "WENT ON" not in output
    seconds = noticed(output)
    if transport == "torch":  # mpirun may end the others before they can say anything
        assert sorted(seconds) == [rank for rank in range(ranks) if rank != 1], output
    if scenario == "stopped" or transport == "torch":
        assert seconds, output
        assert kept_what_they_had(output) == sorted(seconds), output
    limits = KILLED_WITHIN_SECONDS if scenario == "killed" else dict.fromkeys((0, 2), STOPPED_WITHIN_SECONDS)
    assert all(seconds[rank] < limits[rank] for rank in seconds), output


@pytest.mark.parametrize(("transport", "ranks"), [("torch", 2), ("mpi", 3)])
def test_a_late_rank_is_waited_for_and_sums_are_exact(ranks, transport):
    output = output_of("late", ranks, transport, 60)
    assert len(struck(output)) == 1, output
    assert output.count("WENT ON") == ranks, output  # each compared every result with the exact sum
