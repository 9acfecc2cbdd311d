"""Every transport: again after shutdown, long messages, threads, timeline, a user's process group, smaller jobs."""

from __future__ import annotations

import pytest

from tests.ranks import RankedCases

CASES = RankedCases("tests.transports.transport_cases")


@pytest.mark.every_size
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("case", CASES.names)
def test_transports(case, ranks, transport):
    CASES.check(case, ranks, transport)
