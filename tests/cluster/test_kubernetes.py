"""The manifest for Kubernetes, with the containers as its pods: the MPI Operator's keys and hostfile are made here."""

from __future__ import annotations

import json
import re
import time

import pytest

from tests.cluster.cluster import HOSTS, ROOT, WORKERS, Cluster
from tests.cluster.test_launchers import INTRODUCE, check

pytestmark = pytest.mark.thorough
MANIFEST = (ROOT / "docker" / "kubernetes" / "mpijob.yaml").read_text()
START_SECONDS = 10
# As the operator mounts them: one key for all, of which the servers are too, that a group may read.
MAKE_KEY = "ssh-keygen -q -t rsa -N '' -f /work/id_rsa && base64 -w 0 /work/id_rsa && rm /work/id_rsa*"
MOUNT = """
mkdir -p ~/.ssh && echo {key} | base64 -d > ~/.ssh/id_rsa && chmod 600 ~/.ssh/id_rsa
ssh-keygen -y -f ~/.ssh/id_rsa > ~/.ssh/authorized_keys && chmod 664 ~/.ssh/authorized_keys
# The image's own configuration, which docker/kubernetes/Dockerfile replaces, comes after this one.
cp /kubernetes/ssh_config ~/.ssh/config && chmod 600 ~/.ssh/config
"""


def commands() -> list[list[str]]:
    """What the launcher and the workers run."""
    return [json.loads(text) for text in re.findall(r"command: (\[[^]]*\])", MANIFEST)]


def test_the_manifests_launcher_reaches_its_workers(cluster: Cluster):
    launcher, worker = commands()
    assert worker[-1] == "/etc/ssh/mpi_operator_sshd_config"
    key = cluster.shell(MAKE_KEY, "launcher").strip()
    try:
        for host in HOSTS:
            cluster.shell(MOUNT.format(key=key), host)
        hostfile = "".join(f"{host} slots=2\\n" for host in WORKERS)
        cluster.shell(f"install -d /etc/mpi && printf '{hostfile}' > /etc/mpi/hostfile", "launcher", "root")
        for host in WORKERS:
            server = " ".join([*worker[:-1], "/kubernetes/sshd_config"])
            cluster.shell(f"{server} > /dev/null 2>&1 < /dev/null &", host)
        wait_for_servers(cluster)
        assert launcher[-2:] == ["python", "/work/train.py"]
        result = cluster.run([*launcher[:-2], *INTRODUCE])
        check(result, 6, "mpi", per_host=2)
    finally:
        for host in HOSTS:
            cluster.shell("pkill -f '[m]pi_operator|[/]kubernetes/sshd_config' || true; rm -rf ~/.ssh", host)
        cluster.shell("rm -rf /etc/mpi", "launcher", "root")


def wait_for_servers(cluster: Cluster) -> None:
    deadline = time.monotonic() + START_SECONDS
    for host in WORKERS:
        while cluster.run(["ssh", host, "true"]).status != 0:
            assert time.monotonic() < deadline, f"no sshd on {host}"
            time.sleep(0.2)
