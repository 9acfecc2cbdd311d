"""Operations on tensors, on real ranks."""

from __future__ import annotations

import pytest

from tests.ranks import RankedCases

RESULTS = RankedCases("tests.torch.ops_cases")


@pytest.mark.every_size
@pytest.mark.parametrize("case", RESULTS.names)
def test_ops(case: str, size: int, transport: str) -> None:
    RESULTS.check(case, size, transport)
