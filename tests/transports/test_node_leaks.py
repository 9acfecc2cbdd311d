"""A job that comes and goes many times in one process leaves no descriptor, thread, memory or file behind."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from tests.ranks import TORCH, run_ranks
from tests.transports.node_leaks import grown
from tests.transports.shared import gone_within, needs_memory_files, needs_native, shared_files

pytestmark = [needs_native, needs_memory_files]

SETTLE_SECONDS = 10.0


def held_by_ranks(kind: str, rounds: int, transport: str) -> list[dict[str, Any]]:
    """What each rank held: inside a round, before the rounds, and after them."""
    command = [sys.executable, "-m", "tests.transports.node_leaks", kind, str(rounds)]
    status, output = run_ranks(command, 2, transport, timeout=120, preload=TORCH)
    lines = output.splitlines()
    held = [json.loads(line.partition("HELD ")[2]) for line in lines if line.startswith("HELD ")]
    assert status == 0, output
    assert len(held) == 2, output
    return held


@pytest.mark.essential(transport="torch", kind="used", rounds=40)
@pytest.mark.parametrize(("kind", "rounds"), [("empty", 200), ("used", 200), ("used", 40)])
def test_init_and_shutdown_leave_nothing_behind(kind, rounds, transport):
    files = shared_files()
    for rank in held_by_ranks(kind, rounds, transport):
        inside, before, after = rank["inside"], rank["before"], rank["after"]
        # What is counted is there to be counted.
        assert inside["mapped"] > 0
        assert inside["threads"] > before["threads"]
        assert any("memfd:hvdkit" in target for target in inside["descriptors"])
        assert not grown(before, after)
        assert after["mapped"] == 0
    assert gone_within(SETTLE_SECONDS, lambda: shared_files() - files), shared_files() - files
