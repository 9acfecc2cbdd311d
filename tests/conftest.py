"""Fixtures of every room: the transports that carry a job, and folders for the files that mpirun leaves."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator

import pytest

from tests.ranks import FOR_OPEN_MPI, SEGMENTS

SHARED_MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None  # noqa: S108 (Open MPI's own choice)

pytest_plugins = ["tests.suite.plugin"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """What tests need that not every machine has."""
    parser.addoption("--cluster", metavar="IMAGE", help="run tests/cluster on containers of this image")


@pytest.fixture(scope="session", autouse=True)
def mpi_sessions() -> Iterator[None]:
    """Folders for what mpiruns and their ranks leave when they are killed.

    A later mpirun with the same pid would stumble over the first. Its path is short, since paths of sockets, which lie
    there, must be.
    """
    with (
        tempfile.TemporaryDirectory(prefix="hvdkit-", dir="/tmp", ignore_cleanup_errors=True) as folder,
        tempfile.TemporaryDirectory(prefix=FOR_OPEN_MPI, dir=SHARED_MEMORY, ignore_cleanup_errors=True) as segments,
    ):
        os.environ.update({"PRTE_MCA_prte_tmpdir_base": folder, SEGMENTS: segments})
        yield


@pytest.fixture(params=["mpi", "torch"])
def transport(request: pytest.FixtureRequest) -> str:
    """Which transport carries the bytes."""
    return str(request.param)
