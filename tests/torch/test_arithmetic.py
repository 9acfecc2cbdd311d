"""What an average is to the last bit, and the same bits on all ranks whatever their threads were set to."""

from __future__ import annotations

import pytest

from tests.ranks import RankedCases

MODULE = "tests.torch.arithmetic_cases"
RESULTS = RankedCases(MODULE)
WITHOUT_MEMORY = RankedCases(MODULE, HVDKIT_NODE_MEMORY="0")
BETWEEN = RankedCases(MODULE, per_node=2)


@pytest.mark.parametrize("case", RESULTS.names)
def test_on_one_node(case: str, size: int, transport: str) -> None:
    RESULTS.check(case, size, transport)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("case", RESULTS.names)
def test_without_shared_memory(case: str, ranks: int) -> None:
    WITHOUT_MEMORY.check(case, ranks, "torch")


@pytest.mark.parametrize("case", RESULTS.names)
def test_between_nodes(case: str) -> None:
    BETWEEN.check(case, 3, "torch")
