"""Several ranks on one GPU, by NCCL and by host memory. Without a GPU the CPU stands in for it: see card.py."""

from __future__ import annotations

import os
import sys

import pytest

from tests.gpu import card
from tests.ranks import CASES, ROOT, RankedCases, run_ranks

WAYS = ["nccl", "host"]
SIZES = [2, pytest.param(4, marks=pytest.mark.thorough)]
SECONDS = 60  # for a case, or the start


def variables(way: str) -> dict[str, str]:
    """The environment of ranks. On a GPU several jobs take turns, and the first step compiles kernels."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    patience = {"HVDKIT_START_TIMEOUT_SECONDS": "90", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "120"}
    # A pool of compilers would keep the pipe of a rank's output open.
    return {
        "TESTS_DEVICE": card.DEVICE.type, "TESTS_WAY": way, "PYTHONPATH": path, "TORCHINDUCTOR_COMPILE_THREADS": "1",
        **patience,
    }  # fmt: skip


def cases(module: str) -> dict[str, RankedCases]:
    """A module's cases on each way."""
    return {
        way: RankedCases(
            f"tests.gpu.{module}",
            runner="tests.gpu.ranks",
            preload=() if card.IS_GPU else CASES,  # CUDA does not live through a fork
            seconds=SECONDS,
            **variables(way),
        )
        for way in WAYS
    }


OPERATIONS, TRAINING, RACES, STATE = map(cases, ("operation_cases", "training_cases", "race_cases", "state_cases"))


@pytest.mark.parametrize("ranks", SIZES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", OPERATIONS["nccl"].names)
def test_operations(case, way, ranks):
    OPERATIONS[way].check(case, ranks, "torch")


@pytest.mark.parametrize("ranks", SIZES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", TRAINING["nccl"].names)
def test_training(case, way, ranks):
    TRAINING[way].check(case, ranks, "torch")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", RACES["nccl"].names)
def test_races(case, way):
    RACES[way].check(case, 2, "torch")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", STATE["nccl"].names)
def test_state(case, way):
    STATE[way].check(case, 2, "torch")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("how", ["dies", "memory"])
def test_a_rank_that_dies_or_has_no_memory_while_work_is_queued_is_named(how, way):
    command = [sys.executable, "-m", "tests.gpu.failing", how]
    _, output = run_ranks(command, 2, "torch", SECONDS, **variables(way), HVDKIT_TIMEOUT_SECONDS="20")
    assert "rank 0 was told: " in output, output
    assert "rank 1" in output.split("rank 0 was told: ")[1].splitlines()[0], output
    assert "trained to the end" not in output
    assert how == "dies" or "out of memory" in output.lower(), output
