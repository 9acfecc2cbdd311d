"""A rank that dies, stops or falls behind in the middle of a pass through shared memory, where others need its part.

A rank that was stopped there and outlived changes nothing when it is woken.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest

from tests.ranks import TORCH, run_ranks, start_ranks
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
        kept_what_they_had = [rank for rank in (0, 2) if f"RANK {rank} KEPT" in output]
        assert kept_what_they_had == sorted(seconds), output
    limits = KILLED_WITHIN_SECONDS if scenario == "killed" else dict.fromkeys((0, 2), STOPPED_WITHIN_SECONDS)
    assert all(seconds[rank] < limits[rank] for rank in seconds), output


@pytest.mark.parametrize(("transport", "ranks"), [("torch", 2), ("mpi", 3)])
def test_a_late_rank_is_waited_for_and_sums_are_exact(ranks, transport):
    output = output_of("late", ranks, transport, 60)
    assert len(struck(output)) == 1, output
    assert output.count("WENT ON") == ranks, output  # each compared every result with the exact sum


def output_of_late_writer(scenario: str, ranks: int) -> str:
    """What all ranks printed; those that outlive rank 1 wake it."""
    status, output = run_ranks(
        [sys.executable, "-m", "tests.faults.late_writer", scenario],
        ranks,
        "torch",
        timeout=120,
        preload=TORCH,
        HVDKIT_TIMEOUT_SECONDS=str(TIMEOUT_SECONDS),
        HVDKIT_VERIFY="0",
        HOROVOD_FUSION_THRESHOLD=str(1 << 30),  # one operation a step, so that one pass is the whole step
    )
    assert "STRIKES " in output, output
    assert "RANK 1 HAS WRITTEN" in output, output
    assert status == 0, output
    return output


def test_the_injection_injects():
    output = output_of_late_writer("unprotected", 2)
    assert "RANK 0 WAS CHANGED" in output, output


@pytest.mark.parametrize("ranks", [2, 3])
def test_no_byte_of_the_others_changes_and_they_go_on_once_they_have_cleared_their_gradients(ranks):
    output = output_of_late_writer("protected", ranks)
    for rank in (0, 2)[: ranks - 1]:
        assert f"RANK {rank} KEPT ALL" in output, output
        assert f"RANK {rank} WENT ON" in output, output
        noticed = next(line for line in output.splitlines() if line.startswith(f"RANK {rank} NOTICED"))
        assert all(words in noticed for words in ("rank 1", "half summed", "HINT"))
    assert "RANK 1 NOTICED" in output, output  # the woken rank gets an error, and no wrong sums
    assert "RANK 1 TOOK ALL STEPS" not in output
    assert "a sum is wrong" not in output
