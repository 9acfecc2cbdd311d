"""Children that ranks fork, on real ranks."""

from __future__ import annotations

import sys

import pytest

from tests.ranks import TORCH, RankedCases, run_ranks

ENDINGS = "tests.torch.forked_endings"
WAYS = ("returns", "exits", "exits with 3", "caught", "raises", "leaves")
RESULTS = RankedCases("tests.torch.forked_cases")


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("case", RESULTS.names)
def test_forked(case: str, ranks: int, transport: str) -> None:
    RESULTS.check(case, ranks, transport)


@pytest.mark.parametrize(
    ("transport", "arguments", "variables"),
    [
        ("mpi", [], {}),
        ("mpi", ["mpi4py first"], {}),
        ("torch", [], {}),
        ("torch", [], {"HVDKIT_NODE_MEMORY": "0"}),
    ],
)
def test_children_end_however_they_like(transport: str, arguments: list[str], variables: dict[str, str]) -> None:
    command = [sys.executable, "-m", ENDINGS, *arguments]
    status, output = run_ranks(command, 2, transport, timeout=200, preload=TORCH, **variables)
    assert status == 0, output
    assert all(f"RANK {rank} THROUGH" in output for rank in range(2)), output
    for way in WAYS:
        assert output.count(f"CHILD {way} CLEANED UP") == 2, output
