"""Fixtures that every room's tests share: the numbers of ranks and the transports that a job is run on."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator

import pytest

# By the number of ranks, the transports that jobs of PyTorch run on: starting ranks is most of what the tests take, and
# what differs between transports shows with two ranks.
TRANSPORTS = {1: ["mpi"], 2: ["mpi", "torch"], 3: ["torch"], 4: ["mpi"]}


def pytest_addoption(parser: pytest.Parser) -> None:
    """What tests need that not every machine has."""
    parser.addoption("--cluster", metavar="IMAGE", help="run tests/cluster on containers of this image")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what TRANSPORTS leaves out."""
    left_out = set()
    for item in items:
        parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        ranks = parameters.get("ranks", parameters.get("size"))
        is_pytorchs = "transport" in parameters and "torch" in item.path.parts
        if is_pytorchs and parameters["transport"] not in TRANSPORTS.get(ranks, [parameters["transport"]]):
            left_out.add(item)
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session", autouse=True)
def mpi_sessions() -> Iterator[None]:
    """A folder for what mpiruns leave when they are killed, where a later one with the same pid would stumble over it.

    Its path is short, since paths of sockets, which lie there, must be.
    """
    with tempfile.TemporaryDirectory(prefix="hvdkit-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        os.environ.update(PRTE_MCA_prte_tmpdir_base=folder)
        yield


@pytest.fixture(params=[1, 2, 3, 4], ids=lambda size: f"np{size}")
def size(request: pytest.FixtureRequest) -> int:
    """How many ranks."""
    return int(request.param)


@pytest.fixture(params=["mpi", "torch"])
def transport(request: pytest.FixtureRequest) -> str:
    """Which transport carries the bytes."""
    return str(request.param)
