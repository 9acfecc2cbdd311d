"""What every test of the launcher runs with: both ways to start ranks."""

from __future__ import annotations

import pytest


@pytest.fixture(params=["--mpi", "--gloo"])
def controller(request: pytest.FixtureRequest) -> str:
    """The flag that chooses how ranks are started."""
    return str(request.param)
