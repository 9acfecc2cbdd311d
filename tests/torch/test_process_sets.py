"""Operations among some of the ranks, on real ranks."""

from __future__ import annotations

import pytest

from tests.ranks import RankedCases

RESULTS = RankedCases("tests.torch.process_sets_cases", HOROVOD_DYNAMIC_PROCESS_SETS="1")


@pytest.mark.every_size
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("case", RESULTS.names)
def test_process_sets(case: str, ranks: int, transport: str) -> None:
    RESULTS.check(case, ranks, transport)
