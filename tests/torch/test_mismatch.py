"""Ranks that disagree, on real ranks."""

from __future__ import annotations

import pytest

from tests.ranks import RankedCases

RESULTS = RankedCases("tests.torch.mismatch_cases")


@pytest.mark.parametrize("case", RESULTS.names)
def test_mismatch(case: str, size: int, transport: str) -> None:
    RESULTS.check(case, size, transport)
