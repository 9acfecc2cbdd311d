"""A host of the network that belongs to no job attacks every port that a job has open on the others."""

from __future__ import annotations

import threading
import time

import pytest

from hvdkit.environments.network import is_loopback
from tests.cluster.cluster import PATIENCE_SECONDS, Cluster

MEMBERS, OUTSIDER = ("w1", "w2"), "w3"
FOLDER = "/tmp/tmp.steady"  # noqa: S108 (there)
START_SECONDS = 60


@pytest.mark.parametrize("transport", ["torch", pytest.param("horovod", marks=pytest.mark.thorough)])
def test_an_outsider_of_the_network_changes_nothing(cluster: Cluster, transport):
    for host in MEMBERS:
        cluster.shell(f"mkdir {FOLDER}", host)
    flags = ["--gloo", "-np", "2", "-H", ",".join(f"{host}:1" for host in MEMBERS)]
    command = ["hvdkitrun", *flags, "python", "-m", "tests.faults.steady", FOLDER]
    said: list[str] = []
    try:
        with cluster.running(command, PYTHONPATH="/checkout", HVDKIT_TRANSPORT=transport) as job:
            reader = threading.Thread(target=lambda: said.extend(job.stdout))
            reader.start()
            wait_until_started(cluster)
            places = [place for host in MEMBERS for place in listening(cluster, host)]
            assert len(places) >= 3, places  # the store, and Gloo on each host
            of_the_job = {own_address(cluster, host) for host in MEMBERS}
            reachable = [word for place in places if not is_loopback(place[0]) for word in place]
            assert {*reachable[::2]} == of_the_job, places
            attack = cluster.run(
                ["env", "--chdir", "/checkout", "python", "-m", "tests.faults.outsider", *reachable], host=OUTSIDER
            )
            assert attack.status == 0, attack.output
            cluster.shell(f"touch {FOLDER}/end", MEMBERS[0])
            # The ranks have looked at every sum; they end well only if all were right.
            assert job.wait(PATIENCE_SECONDS) == 0, said
            reader.join(PATIENCE_SECONDS)
    finally:
        for host in MEMBERS:
            cluster.shell(f"rm -rf {FOLDER}", host)


def own_address(cluster: Cluster, host: str) -> str:
    return cluster.shell("hostname --ip-address", host).split()[0]


def listening(cluster: Cluster, host: str) -> list[tuple[str, str]]:
    """The addresses and ports that are open on a host, but for those of sshd and of Docker's names."""
    lines = cluster.shell("ss -Hltn | grep -v ':2222 ' | grep -v '127[.]0[.]0[.]11:' || true", host).splitlines()
    found = [line.split()[3].rpartition(":") for line in lines]
    return [(address.strip("[]"), port) for address, _, port in found]


def wait_until_started(cluster: Cluster) -> None:
    deadline = time.monotonic() + START_SECONDS
    for rank, host in enumerate(MEMBERS):
        while cluster.run(["test", "-e", f"{FOLDER}/started.{rank}"], host=host).status != 0:
            assert time.monotonic() < deadline, f"no rank has started on {host}"
            time.sleep(0.2)
