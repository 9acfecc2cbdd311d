"""Fixtures that every room's tests share: the numbers of ranks and the transports that a job is run on."""

from __future__ import annotations

import pytest


@pytest.fixture(params=[1, 2, 3, 4], ids=lambda size: f"np{size}")
def size(request: pytest.FixtureRequest) -> int:
    """How many ranks."""
    return int(request.param)


@pytest.fixture(params=["mpi", "torch"])
def transport(request: pytest.FixtureRequest) -> str:
    """Which transport carries the bytes."""
    return str(request.param)
