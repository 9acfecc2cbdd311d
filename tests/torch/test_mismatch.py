"""Ranks that disagree, on real ranks."""

from __future__ import annotations

import pytest

from tests.ranks import RankedCases

RESULTS = RankedCases("tests.torch.mismatch_cases")
PLANS = RankedCases("tests.torch.plan_mismatch_cases")


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("case", RESULTS.names)
def test_mismatch(case: str, ranks: int, transport: str) -> None:
    RESULTS.check(case, ranks, transport)


@pytest.mark.parametrize("case", PLANS.names)
def test_plan_mismatch(case: str, transport: str) -> None:
    PLANS.check(case, 3, transport)
