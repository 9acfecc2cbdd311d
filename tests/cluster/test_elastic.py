"""Elastic jobs on three hosts: ranks and hosts are lost, come back, and join without ssh."""

from __future__ import annotations

import json
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from tests.cluster.cluster import WORKERS, Cluster

PROGRAM = ["python", "/checkout/tests/launch/elastic_program.py", "/tmp/end"]  # noqa: S108 (there)
HOSTS = ",".join(f"{host}:1" for host in WORKERS)
ENVIRONMENT = {"PYTHONPATH": "/checkout", "HVDKIT_TIMEOUT_SECONDS": "5", "OMP_NUM_THREADS": "1"}


class Job:
    """A job that runs in the cluster, and what its ranks told of their generations."""

    def __init__(self, cluster: Cluster, process: subprocess.Popen[str]) -> None:
        self._cluster, self._process = cluster, process
        self.generations: dict[int, list[dict[str, Any]]] = defaultdict(list)
        self.said: list[str] = []

    def wait_for(self, size: int) -> list[dict[str, Any]]:
        """Return what the ranks of the next generation of this size tell, in their order."""
        earlier = max(self.generations, default=0)
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.said.append(line)
            match = re.match(r"\[(\d+)\]<stdout>: (\{.*\})", line)
            fact = json.loads(match[2]) if match is not None else {}
            if "generation" in fact:
                number = fact["generation"]
                self.generations[number].append(fact)
                told = self.generations[number]
                if number > earlier and len(told) == fact["size"] == size:
                    return sorted(told, key=lambda each: int(each["rank"]))
        raise AssertionError("".join(self.said))

    def finish(self) -> None:
        """Have all ranks end at the same step, with success and nothing left behind."""
        self._cluster.shell("touch /tmp/end", WORKERS[0])
        assert self._process.stdout is not None
        self.said += self._process.stdout
        status = self._process.wait()
        self._cluster.shell("rm /tmp/end", WORKERS[0])
        assert status == 0, "".join(self.said)
        assert self._cluster.left_on_hosts() == {}


@contextmanager
def elastic_job(cluster: Cluster, *flags: str) -> Iterator[Job]:
    with cluster.running(["hvdkitrun", *flags, *PROGRAM], **ENVIRONMENT) as process:
        yield Job(cluster, process)


def test_a_rank_that_is_killed_is_replaced_on_its_host(cluster: Cluster):
    with elastic_job(cluster, "-np", "3", "--min-np", "1", "-H", HOSTS) as job:
        job.wait_for(3)
        cluster.shell("pkill -KILL -f '[e]lastic_program'", WORKERS[1])
        shrunk = job.wait_for(2)
        grown = job.wait_for(3)
        assert 0 < shrunk[0]["steps"] < grown[0]["steps"] == grown[2]["steps"]
        job.finish()
    assert any(f"rank 1 on {WORKERS[1]} was killed by signal SIGKILL (9)" in line for line in job.said), job.said


@pytest.mark.thorough
def test_a_host_that_is_cut_off_is_left_and_taken_back(cluster: Cluster):
    with elastic_job(cluster, "-np", "3", "--min-np", "1", "-H", HOSTS) as job:
        job.wait_for(3)
        with cluster.cut(WORKERS[2]):
            shrunk = job.wait_for(2)
        grown = job.wait_for(3)
        assert shrunk[0]["steps"] < grown[0]["steps"] == grown[2]["steps"]
        job.finish()
    assert any(f"host {WORKERS[2]} is lost" in line for line in job.said), job.said


def test_hosts_join_without_ssh_and_leave(cluster: Cluster):
    with ExitStack() as stack:
        flags = "-np", "2", "--min-np", "1", "--listen", "4000", "--secret-file", "/tmp/secret"  # noqa: S108 (there)
        job = stack.enter_context(elastic_job(cluster, *flags))
        secret = cluster.shell(
            "until [ -s /tmp/secret ]; do sleep 0.1; done; cat /tmp/secret; rm /tmp/secret", "launcher"
        )
        joined = {}
        for host in WORKERS:
            cluster.shell(f"umask 077; printf %s {secret.strip()} > /tmp/secret", host)
            words = ["hvdkitrun", "--join", "launcher:4000", "--secret-file", "/tmp/secret"]  # noqa: S108 (there)
            joined[host] = stack.enter_context(cluster.running(words, host, **ENVIRONMENT))
        job.wait_for(3)
        cluster.shell("rm /tmp/secret; pkill -TERM -f 'bin/hvdkitrun [-]-join'", WORKERS[2])
        job.wait_for(2)
        assert joined[WORKERS[2]].wait() == 0
        for host in WORKERS[:2]:
            cluster.shell("rm /tmp/secret", host)
        job.finish()
        assert [joined[host].wait() for host in WORKERS] == [0, 0, 0]
