"""An operation and a codec that stand outside of hvdkit, each in one file, on real ranks."""

from __future__ import annotations

import pytest

from tests.ranks import RankedCases

RESULTS = RankedCases("tests.extending.cases")


@pytest.mark.parametrize(("ranks", "transport"), [(2, "mpi"), (3, "torch")])
@pytest.mark.parametrize("case", RESULTS.names)
def test_extending(case: str, ranks: int, transport: str) -> None:
    RESULTS.check(case, ranks, transport)
