"""Timelines of training steps, on real ranks."""

from __future__ import annotations

import pytest

from tests.ranks import RankedCases

MODULE = "tests.torch.timeline_cases"
RESULTS = RankedCases(MODULE)
WITHOUT_MEMORY = RankedCases(MODULE, HVDKIT_NODE_MEMORY="0")
BETWEEN = RankedCases(MODULE, per_node=1)
LATE = [name for name in RESULTS.names if "last_rank" in name]


@pytest.mark.parametrize("case", RESULTS.names)
def test_timeline(case: str, size: int, transport: str) -> None:
    RESULTS.check(case, size, transport)


@pytest.mark.parametrize("case", LATE)
def test_timeline_without_shared_memory(case: str, size: int, transport: str) -> None:
    WITHOUT_MEMORY.check(case, size, transport)


@pytest.mark.parametrize("case", LATE)
def test_timeline_between_nodes(case: str) -> None:
    BETWEEN.check(case, 3, "torch")
