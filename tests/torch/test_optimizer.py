"""DistributedOptimizer on real ranks over every transport: the basics on 1 to 4, the rest where it says something."""

from __future__ import annotations

import pytest

from tests.ranks import RankedCases

BASICS = RankedCases("tests.torch.optimizer_cases")
SMALL_BUCKETS = RankedCases("tests.torch.optimizer_cases", HOROVOD_FUSION_THRESHOLD="64")
STRATEGIES = RankedCases("tests.torch.optimizer_strategy_cases", HOROVOD_DYNAMIC_PROCESS_SETS="1")
CALLS = RankedCases("tests.torch.optimizer_calls_cases")
ADASUM = RankedCases("tests.torch.optimizer_adasum_cases")
ORDER = RankedCases("tests.torch.optimizer_order_cases", HOROVOD_FUSION_THRESHOLD="0")
COPIES = RankedCases("tests.torch.optimizer_copies_cases", HVDKIT_VERIFY="1")
LIFECYCLE = RankedCases("tests.torch.optimizer_lifecycle_cases")
INTEGRATION = RankedCases("tests.torch.optimizer_integration_cases")
KINDS = RankedCases("tests.torch.optimizer_kinds_cases")
KINDS_APART = RankedCases("tests.torch.optimizer_kinds_cases", HVDKIT_NODE_MEMORY="0")
PAIRING = RankedCases("tests.torch.optimizer_pairing_cases")
PAIRING_APART = RankedCases("tests.torch.optimizer_pairing_cases", HVDKIT_NODE_MEMORY="0")
UNWRAPPED = RankedCases("tests.torch.unwrapped_cases")


@pytest.mark.every_size
@pytest.mark.parametrize("case", BASICS.names)
def test_basics(case: str, size: int, transport: str) -> None:
    BASICS.check(case, size, transport)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("case", SMALL_BUCKETS.names)
def test_basics_with_a_bucket_for_each_gradient(case: str, ranks: int, transport: str) -> None:
    SMALL_BUCKETS.check(case, ranks, transport)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("case", CALLS.names)
def test_calls(case: str, ranks: int, transport: str) -> None:
    CALLS.check(case, ranks, transport)


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.thorough), 2, 3])
@pytest.mark.parametrize("case", UNWRAPPED.names)
def test_what_nobody_wrapped(case: str, ranks: int, transport: str) -> None:
    UNWRAPPED.check(case, ranks, transport)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("case", STRATEGIES.names)
def test_strategies(case: str, ranks: int, transport: str) -> None:
    STRATEGIES.check(case, ranks, transport)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("case", ADASUM.names)
def test_adasum(case: str, ranks: int, transport: str) -> None:
    ADASUM.check(case, ranks, transport)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("case", ORDER.names)
def test_order(case: str, ranks: int, transport: str) -> None:
    ORDER.check(case, ranks, transport)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("case", LIFECYCLE.names)
def test_lifecycle(case: str, ranks: int, transport: str) -> None:
    LIFECYCLE.check(case, ranks, transport)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("case", INTEGRATION.names)
def test_integration(case: str, ranks: int, transport: str) -> None:
    INTEGRATION.check(case, ranks, transport)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("case", KINDS.names)
def test_kinds_of_gradients(case: str, ranks: int, transport: str) -> None:
    KINDS.check(case, ranks, transport)


@pytest.mark.parametrize("case", KINDS_APART.names)
def test_kinds_of_gradients_without_node_memory(case: str, transport: str) -> None:
    KINDS_APART.check(case, 2, transport)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("case", PAIRING.names)
def test_pairing(case: str, ranks: int, transport: str) -> None:
    PAIRING.check(case, ranks, transport)


@pytest.mark.parametrize("case", PAIRING_APART.names)
def test_pairing_without_node_memory(case: str, transport: str) -> None:
    PAIRING_APART.check(case, 2, transport)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("case", COPIES.names)
def test_copies(case: str, ranks: int, transport: str) -> None:
    COPIES.check(case, ranks, transport)
