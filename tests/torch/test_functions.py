"""Broadcast of objects, parameters and optimizer state, on real ranks."""

from __future__ import annotations

import pytest

from tests.ranks import RankedCases

RESULTS = RankedCases("tests.torch.functions_cases")


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("case", RESULTS.names)
def test_functions(case: str, ranks: int, transport: str) -> None:
    RESULTS.check(case, ranks, transport)
