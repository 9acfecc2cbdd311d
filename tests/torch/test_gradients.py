"""Gradients of operations, on real ranks."""

from __future__ import annotations

import pytest

from tests.ranks import RankedCases

RESULTS = RankedCases("tests.torch.gradient_cases")


@pytest.mark.parametrize("case", RESULTS.names)
def test_gradients(case: str, size: int, transport: str) -> None:
    RESULTS.check(case, size, transport)
