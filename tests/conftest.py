"""Fixtures of every room: what carries a job, what starts it, and folders for the files that mpirun leaves."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator

import pytest

from tests.ranks import FOR_OPEN_MPI, SEGMENTS

SHARED_MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None  # noqa: S108 (Open MPI's own choice)

pytest_plugins = ["tests.suite.plugin"]


def pytest_addoption(parser: pytest.Parser) -> None:
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
    return str(request.param)


@pytest.fixture(params=["--mpi", "--gloo"])
def controller(request: pytest.FixtureRequest) -> str:
    """The flag of hvdkitrun that says how ranks are started."""
    return str(request.param)
