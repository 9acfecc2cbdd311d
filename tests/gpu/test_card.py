"""A rank that fails on a GPU that several ranks share. Without a GPU the CPU stands in for it: see card.py."""

from __future__ import annotations

import sys

import pytest

from tests.gpu.card import SECONDS, WAYS, variables
from tests.ranks import run_ranks

ways = pytest.mark.parametrize("way", WAYS)


def output_of(how: str, way: str) -> str:
    """What ranks print of which rank 1 fails; rank 0 was told that it was rank 1."""
    command = [sys.executable, "-m", "tests.gpu.failing", how]
    _, output = run_ranks(command, 2, "torch", SECONDS, **variables(way), HVDKIT_TIMEOUT_SECONDS="20")
    assert "rank 0 was told: " in output, output
    assert "rank 1" in output.split("rank 0 was told: ")[1].splitlines()[0], output
    return output


@ways
def test_a_rank_that_dies_while_work_is_queued_is_named(way):
    assert "trained to the end" not in output_of("dies", way)


@ways
def test_a_rank_without_memory_on_its_gpu_is_named_on_all(way):
    assert "out of memory" in output_of("memory", way).lower()
