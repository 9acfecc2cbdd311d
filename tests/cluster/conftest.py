"""The cluster that these tests run on. It is started once; each test must leave nothing on its hosts."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.cluster.cluster import HOSTS, Cluster

SETTLE_SECONDS = 10


@pytest.fixture(scope="session")
def started(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """The containers, from start to end."""
    image = request.config.getoption("--cluster")
    if image is None:
        pytest.skip("needs a cluster of containers: make cluster-test")
    with Cluster(image) as cluster:
        yield cluster


@pytest.fixture
def cluster(started: Cluster) -> Iterator[Cluster]:
    """The cluster, of which every host is as it was when the test ends."""
    yield started
    deadline = time.monotonic() + SETTLE_SECONDS
    while left := {host: text for host in HOSTS if (text := started.left_behind(host))}:
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.2)
