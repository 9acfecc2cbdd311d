"""SyncBatchNorm against one process with all batches, on real ranks."""

from __future__ import annotations

import pytest

from tests.ranks import RankedCases

RESULTS = RankedCases("tests.torch.sync_batch_norm_cases")


@pytest.mark.parametrize("case", RESULTS.names)
def test_sync_batch_norm(case: str, size: int, transport: str) -> None:
    RESULTS.check(case, size, transport)
