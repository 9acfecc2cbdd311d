"""What ``hvd.init()`` is given, on three real ranks and on one that is there before the others."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.ranks import ROOT, RankedCases, free_port, rank_environment

RESULTS = RankedCases("tests.torch.startup_cases")


@pytest.mark.parametrize("case", RESULTS.names)
def test_startup(case: str, transport: str) -> None:
    RESULTS.check(case, 3, transport)


WAITS_FOR_NOBODY = """
import hvdkit.torch as hvd
try:
    hvd.init(process_sets=[hvd.ProcessSet([0, 3])])
except ValueError as error:
    print("TOLD", error)
"""


def test_process_sets_that_cannot_be_are_told_before_ranks_meet():
    environment = rank_environment(
        HVDKIT_TRANSPORT="torch",
        HVDKIT_START_TIMEOUT_SECONDS="5",
        RANK="0",
        WORLD_SIZE="3",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(free_port()),
    )
    command = [sys.executable, "-c", WAITS_FOR_NOBODY]
    output = subprocess.check_output(command, env=environment, cwd=ROOT, text=True, timeout=120)
    assert "TOLD ProcessSet: expected ranks from 0 to 2, got [0, 3]" in output
