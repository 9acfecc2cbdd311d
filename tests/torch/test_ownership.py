"""Whose a gradient is, wherever it lies: in the arena, without one, without memory of the node, over two nodes."""

from __future__ import annotations

import os

import pytest

from tests.ranks import RankedCases

CASES = "tests.torch.ownership_cases"
# Reduced beside the backward pass, and not after it, also where the ranks' threads have every core.
IN_FLIGHT = {"HVDKIT_FUSION_THRESHOLD": "65536"}
WHEREVER = {
    "no arena": RankedCases(CASES, HVDKIT_ARENA="0", **IN_FLIGHT),
    "no shared memory": RankedCases(CASES, HVDKIT_NODE_MEMORY="0"),
}
BESIDE = RankedCases(CASES, **IN_FLIGHT)
# After the backward pass, on every machine: each rank says that it computes on as many threads as there are cores.
IN_TURN = RankedCases(CASES, OMP_NUM_THREADS=str(max(2, os.cpu_count() or 1)))
TWO_NODES = RankedCases(CASES, per_node=2)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("case", BESIDE.names)
def test_ownership(case: str, ranks: int, transport: str) -> None:
    (BESIDE if ranks == 2 else IN_TURN).check(case, ranks, transport)


# Without shared memory, what is reduced elsewhere than in the arena goes the way that it goes between nodes.
@pytest.mark.essential(where="no arena")
@pytest.mark.parametrize("where", ["no arena", "no shared memory"])
@pytest.mark.parametrize("case", BESIDE.names)
def test_ownership_without(where: str, case: str) -> None:
    WHEREVER[where].check(case, 2, "torch")


@pytest.mark.parametrize("case", TWO_NODES.names)
def test_ownership_on_two_nodes(case: str) -> None:
    TWO_NODES.check(case, 3, "torch")
