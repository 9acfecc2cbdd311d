"""What users do with gradients, in sequences that hypothesis makes: as in one process, wherever gradients lie."""

from __future__ import annotations

import os

import pytest

from tests.ranks import RankedCases

CASES = "tests.torch.sequence_cases"
# Reduced beside the backward pass, and not after it, also where the ranks' threads have every core.
BESIDE = RankedCases(CASES, HVDKIT_FUSION_THRESHOLD="65536")
# After the backward pass, on every machine.
IN_TURN = RankedCases(CASES, OMP_NUM_THREADS=str(max(2, os.cpu_count() or 1)))
ELSEWHERE = {
    "no arena": RankedCases(CASES, HVDKIT_ARENA="0"),
    "no shared memory": RankedCases(CASES, HVDKIT_NODE_MEMORY="0"),
    "two nodes": RankedCases(CASES, per_node=2),
}


@pytest.mark.parametrize(("ranks", "transport"), [(2, "mpi"), (3, "torch")])
@pytest.mark.parametrize("case", BESIDE.names)
def test_sequences(case: str, ranks: int, transport: str) -> None:
    (BESIDE if ranks == 2 else IN_TURN).check(case, ranks, transport)


@pytest.mark.thorough
@pytest.mark.parametrize(("where", "ranks"), [("no arena", 2), ("no shared memory", 2), ("two nodes", 3)])
@pytest.mark.parametrize("case", BESIDE.names)
def test_sequences_without(case: str, where: str, ranks: int) -> None:
    ELSEWHERE[where].check(case, ranks, "torch")
