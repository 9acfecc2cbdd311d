"""Whole jobs, started as a user starts them."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from tests.ranks import TORCH, run_ranks
from tests.torch import train


@pytest.mark.essential(transport="mpi")
def test_horovod_timeline_writes_a_trace_of_what_rank_0_did(transport: str, tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    command = [sys.executable, "-m", train.__name__]
    environment = {"HOROVOD_TIMELINE": str(path), "HOROVOD_TIMELINE_MARK_CYCLES": "1"}
    status, output = run_ranks(command, 2, transport, preload=TORCH, **environment)
    assert status == 0, output
    events = json.loads(path.read_text())
    rows = {event["tid"]: event["args"]["name"] for event in events if event.get("name") == "thread_name"}
    reductions = [
        event
        for event in events
        if event["ph"] == "B" and event["name"] == "ALLREDUCE" and re.match(r"SGD.*bucket", rows[event["tid"]])
    ]
    assert len(reductions) >= train.STEPS
    assert all(event["args"]["bytes"] > 0 for event in reductions)
    for row in rows:
        phases = [event["ph"] for event in events if event["tid"] == row and event["ph"] in "BE"]
        assert phases.count("B") == phases.count("E"), rows[row]
    names = {event["name"] for event in events if "name" in event}
    assert any(name.startswith("NEGOTIATE_") for name in names), names
    assert any("CYCLE" in name for name in names), names
