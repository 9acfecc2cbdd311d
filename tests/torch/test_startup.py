"""What ``hvd.init()`` is given, on three real ranks."""

from __future__ import annotations

import pytest

from tests.ranks import RankedCases

RESULTS = RankedCases("tests.torch.startup_cases")


@pytest.mark.parametrize("case", RESULTS.names)
def test_startup(case: str, transport: str) -> None:
    RESULTS.check(case, 3, transport)
