"""Whether gradients are reduced beside the backward pass, on real ranks."""

from __future__ import annotations

import pytest

from tests.ranks import RankedCases

CASES = "tests.engine.turns_cases"
FULL = {"OMP_NUM_THREADS": "64"}
RESULTS = {
    "in turn": RankedCases(CASES, **FULL),
    "beside": RankedCases(CASES, HVDKIT_FUSION_THRESHOLD="1000000", **FULL),
}


@pytest.mark.parametrize("when", list(RESULTS))
@pytest.mark.parametrize("case", RESULTS["in turn"].names)
def test_turns(case: str, when: str, transport: str) -> None:
    RESULTS[when].check(case, 2, transport)
