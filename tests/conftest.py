"""Fixtures that every room's tests share: the numbers of ranks and the transports that a job is run on."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Jobs of one and of four ranks run on one transport only: starting ranks is most of what the tests take."""
    twice = [
        item
        for item in items
        if isinstance(item, pytest.Function)
        and hasattr(item, "callspec")
        and item.callspec.params.get("transport") == "torch"
        and item.callspec.params.get("size") in (1, 4)
    ]
    config.hook.pytest_deselected(items=twice)
    items[:] = [item for item in items if item not in set(twice)]


@pytest.fixture(params=[1, 2, 3, 4], ids=lambda size: f"np{size}")
def size(request: pytest.FixtureRequest) -> int:
    """How many ranks."""
    return int(request.param)


@pytest.fixture(params=["mpi", "torch"])
def transport(request: pytest.FixtureRequest) -> str:
    """Which transport carries the bytes."""
    return str(request.param)
