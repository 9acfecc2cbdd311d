"""What stands outside of hvdkit, each in one file, on real ranks: an operation, a codec, a framework, a transport and a
launcher."""

from __future__ import annotations

import sys

import pytest

from tests.extending.line_up import launch
from tests.preloaded import preloaded
from tests.ranks import CASES, RankedCases, rank_environment

RESULTS = RankedCases("tests.extending.cases")
REGISTERED = "tests.extending.registered"
CARRIED = RankedCases("tests.transports.transport_cases", runner=REGISTERED, HVDKIT_NODE_MEMORY="0")
# Without the node's memory, what is sent depends on the algorithm, and that on how busy the machine was at init.
DEPENDS = {"case_communication_statistics_count_bytes"}


@pytest.mark.parametrize(("ranks", "transport"), [(2, "mpi"), (3, "torch")])
@pytest.mark.parametrize("case", RESULTS.names)
def test_extending(case: str, ranks: int, transport: str) -> None:
    RESULTS.check(case, ranks, transport)


@pytest.mark.parametrize("case", [name for name in CARRIED.names if name not in DEPENDS])
def test_a_transport_of_ones_own(case: str) -> None:
    CARRIED.check(case, 3, "unix")


@pytest.mark.parametrize("shared", ["0", "1"])
def test_a_launcher_of_ones_own(shared: str) -> None:
    environment = rank_environment(HVDKIT_TRANSPORT="unix", HVDKIT_NODE_MEMORY=shared)
    command = preloaded([sys.executable, "-m", REGISTERED], CASES, environment)
    started = launch(command, 2, environment)
    told = [one.communicate(timeout=60)[0] for one in started]
    assert [one.returncode for one in started] == [0, 0], told
    assert told == [f"line-up {rank} of 2: unix [0, 1]\n" for rank in range(2)]
