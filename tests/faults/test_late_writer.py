"""A rank that is stopped in the middle of a pass over gradients and outlived changes nothing when it is woken."""

from __future__ import annotations

import sys

import pytest

from tests.ranks import TORCH, run_ranks
from tests.transports.shared import needs_memory_files, needs_native

pytestmark = [needs_native, needs_memory_files]

WORKER = [sys.executable, "-m", "tests.faults.late_writer"]


def output_of(scenario: str, ranks: int) -> str:
    """What all ranks printed; those that outlive rank 1 wake it."""
    status, output = run_ranks(
        [*WORKER, scenario],
        ranks,
        "torch",
        timeout=120,
        preload=TORCH,
        HVDKIT_TIMEOUT_SECONDS="3",
        HVDKIT_VERIFY="0",
        HOROVOD_FUSION_THRESHOLD=str(1 << 30),  # one operation a step, so that one pass is the whole step
    )
    assert "STRIKES " in output, output
    assert "RANK 1 HAS WRITTEN" in output, output
    assert status == 0, output
    return output


def test_the_injection_injects():
    output = output_of("unprotected", 2)
    assert "RANK 0 WAS CHANGED" in output, output


@pytest.mark.parametrize("ranks", [2, 3])
def test_no_byte_of_the_others_changes_and_they_go_on_once_they_have_cleared_their_gradients(ranks):
    output = output_of("protected", ranks)
    for rank in (0, 2)[: ranks - 1]:
        assert f"RANK {rank} KEPT ALL" in output, output
        assert f"RANK {rank} WENT ON" in output, output
        noticed = next(line for line in output.splitlines() if line.startswith(f"RANK {rank} NOTICED"))
        assert all(words in noticed for words in ("rank 1", "half summed", "HINT"))
    assert "RANK 1 NOTICED" in output, output  # the woken rank gets an error, and no wrong sums
    assert "RANK 1 TOOK ALL STEPS" not in output
    assert "a sum is wrong" not in output
