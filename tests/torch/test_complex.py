"""Complex tensors and parameters, on one node, without shared memory, and between nodes."""

from __future__ import annotations

import pytest

from tests.ranks import RankedCases

MODULE = "tests.torch.complex_cases"
RESULTS = RankedCases(MODULE)
WITHOUT_MEMORY = RankedCases(MODULE, HVDKIT_NODE_MEMORY="0")
BETWEEN = RankedCases(MODULE, per_node=2)


@pytest.mark.parametrize("case", RESULTS.names)
def test_on_one_node(case: str, size: int, transport: str) -> None:
    RESULTS.check(case, size, transport)


@pytest.mark.parametrize(("ranks", "transport"), [(2, "mpi"), (2, "torch")])
@pytest.mark.parametrize("case", RESULTS.names)
def test_without_shared_memory(case: str, ranks: int, transport: str) -> None:
    WITHOUT_MEMORY.check(case, ranks, transport)


@pytest.mark.parametrize("case", RESULTS.names)
def test_between_nodes(case: str) -> None:
    BETWEEN.check(case, 3, "torch")
