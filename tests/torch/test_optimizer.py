"""DistributedOptimizer on 1 to 4 real ranks over every transport."""

from __future__ import annotations

import pytest

from tests.ranks import RankedCases

BASICS = RankedCases("tests.torch.optimizer_cases")
SMALL_BUCKETS = RankedCases("tests.torch.optimizer_cases", HOROVOD_FUSION_THRESHOLD="64")
STRATEGIES = RankedCases("tests.torch.optimizer_strategy_cases", HOROVOD_DYNAMIC_PROCESS_SETS="1")
LIFECYCLE = RankedCases("tests.torch.optimizer_lifecycle_cases")
INTEGRATION = RankedCases("tests.torch.optimizer_integration_cases")


@pytest.mark.parametrize("case", BASICS.names)
def test_basics(case: str, size: int, transport: str) -> None:
    BASICS.check(case, size, transport)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("case", SMALL_BUCKETS.names)
def test_basics_with_a_bucket_for_each_gradient(case: str, ranks: int, transport: str) -> None:
    SMALL_BUCKETS.check(case, ranks, transport)


@pytest.mark.parametrize("case", STRATEGIES.names)
def test_strategies(case: str, size: int, transport: str) -> None:
    STRATEGIES.check(case, size, transport)


@pytest.mark.parametrize("case", LIFECYCLE.names)
def test_lifecycle(case: str, size: int, transport: str) -> None:
    LIFECYCLE.check(case, size, transport)


@pytest.mark.parametrize("case", INTEGRATION.names)
def test_integration(case: str, size: int, transport: str) -> None:
    INTEGRATION.check(case, size, transport)
