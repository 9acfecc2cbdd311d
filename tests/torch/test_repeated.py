"""Small allreduces that come again, on real ranks."""

from __future__ import annotations

import pytest

from tests.ranks import RankedCases

RESULTS = RankedCases("tests.torch.repeated_cases", HOROVOD_DYNAMIC_PROCESS_SETS="1")


@pytest.mark.every_size
@pytest.mark.parametrize("case", RESULTS.names)
def test_repeated(case: str, size: int, transport: str) -> None:
    RESULTS.check(case, size, transport)
