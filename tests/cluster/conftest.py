"""The cluster that these tests run on, one a worker of pytest-xdist; each test must leave nothing on its hosts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.cluster import Cluster


@pytest.fixture(scope="session")
def started(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """The containers, from start to end."""
    image = request.config.getoption("--cluster")
    if image is None:
        pytest.skip("needs a cluster of containers: make cluster-test")
    worker = getattr(request.config, "workerinput", {}).get("workerid", "main")
    with Cluster(image, f"hvdkit-tests-{worker}") as cluster:
        yield cluster


@pytest.fixture
def cluster(started: Cluster) -> Iterator[Cluster]:
    """The cluster, of which every host is as it was when the test ends."""
    yield started
    assert started.left_on_hosts() == {}
