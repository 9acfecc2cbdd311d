"""Compression on real ranks, over every transport: on one node everywhere, and between nodes."""

from __future__ import annotations

import pytest

from tests.ranks import RankedCases

MODULE = "tests.torch.compression_cases"
EVERYWHERE = RankedCases(MODULE)
WITHOUT_MEMORY = RankedCases(MODULE, HVDKIT_NODE_MEMORY="0")
BETWEEN = {per_node: RankedCases(MODULE, per_node=per_node) for per_node in (1, 2)}
SMALL_BUCKETS = RankedCases(MODULE, HOROVOD_FUSION_THRESHOLD="64")


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("case", EVERYWHERE.names)
def test_everywhere(case: str, ranks: int, transport: str) -> None:
    EVERYWHERE.check(case, ranks, transport)


@pytest.mark.parametrize(("ranks", "per_node"), [(2, 1), (3, 1), (4, 2), (3, 2)])
@pytest.mark.parametrize("case", EVERYWHERE.names)
def test_between_nodes(case: str, ranks: int, per_node: int, transport: str) -> None:
    BETWEEN[per_node].check(case, ranks, transport)


@pytest.mark.thorough  # as between nodes of one rank each
@pytest.mark.parametrize("case", EVERYWHERE.names)
def test_without_shared_memory(case: str) -> None:
    WITHOUT_MEMORY.check(case, 2, "torch")


@pytest.mark.parametrize("case", EVERYWHERE.names)
def test_with_a_bucket_for_each_gradient(case: str) -> None:
    SMALL_BUCKETS.check(case, 2, "mpi")
