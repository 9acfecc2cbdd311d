"""Updates that go on during the next forward pass, on real ranks: the same bits, whoever reads whatever and when."""

from __future__ import annotations

import pytest

from tests.ranks import RankedCases

OVERLAP = RankedCases("tests.torch.overlap_cases", HOROVOD_FUSION_THRESHOLD="4096")
OTHERS = RankedCases(
    "tests.torch.optimizer_cases",
    "tests.torch.optimizer_calls_cases",
    "tests.torch.optimizer_integration_cases",
    "tests.torch.optimizer_lifecycle_cases",
    "tests.torch.optimizer_copies_cases",
    runner="tests.torch.overlapped",
)


@pytest.mark.parametrize("case", OVERLAP.names)
def test_overlap(case: str, transport: str) -> None:
    OVERLAP.check(case, 2, transport)


@pytest.mark.parametrize("case", OTHERS.names)
def test_the_cases_of_optimizers_that_wait(case: str, transport: str) -> None:
    OTHERS.check(case, 2, transport)
