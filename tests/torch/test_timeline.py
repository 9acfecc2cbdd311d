"""Timelines of training steps, on real ranks."""

from __future__ import annotations

import pytest

from tests.ranks import RankedCases

MODULE = "tests.torch.timeline_cases"
DYNAMIC = {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}
RESULTS = RankedCases(MODULE, **DYNAMIC)
WITHOUT_MEMORY = RankedCases(MODULE, HVDKIT_NODE_MEMORY="0", **DYNAMIC)
BETWEEN = RankedCases(MODULE, per_node=1, **DYNAMIC)


@pytest.mark.parametrize("case", RESULTS.names)
def test_timeline(case: str, size: int, transport: str) -> None:
    RESULTS.check(case, size, transport)


@pytest.mark.parametrize("case", RESULTS.names)
def test_timeline_without_shared_memory(case: str, size: int, transport: str) -> None:
    WITHOUT_MEMORY.check(case, size, transport)


@pytest.mark.parametrize("case", RESULTS.names)
def test_timeline_between_nodes(case: str) -> None:
    BETWEEN.check(case, 3, "torch")
