"""Faults on three hosts: the others learn which rank it was, on every host, and nothing stays behind on any.

The seed decides which rank is struck, and how long after it has come to the moment.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.cluster.cluster import ROOT, WORKERS, Cluster
from tests.faults.injection import LONGEST_DELAY_SECONDS, Fault, Outcome, Verdict, judge
from tests.faults.report import Entry, table

HOSTS = ",".join(f"{host}:1" for host in WORKERS)
TIMEOUT_SECONDS, START_TIMEOUT_SECONDS = 5, 12
REPORT = ROOT / "build" / "cluster-faults.md"
OUT_OF_TIME = 124  # what `timeout` makes of a command that does not end
CHANCE = random.Random(2026)
TRANSPORTS = ("torch", "mpi", "horovod")
EVERYWHERE = [("killed", "allreduce"), ("killed", "first step"), ("stopped", "allreduce"), ("cut", "allreduce")]
# The rest of kinds and moments, one transport each: tests/faults has all of them on one host.
SOMEWHERE = [
    ("killed", "init", "mpi"),
    ("killed", "shutdown", "torch"),
    ("stopped", "broadcast", "horovod"),
    ("stopped", "shutdown", "mpi"),
    ("cut", "checkpoint", "torch"),
    ("raises", "checkpoint", "horovod"),
    ("raises", "first step", "mpi"),
    ("slow", "first step", "torch"),
    ("full disk", "init", "mpi"),
    ("launcher killed", "allreduce", "torch"),
    ("launcher killed", "broadcast", "mpi"),
]
# Which of them `make cluster-test` and continuous integration wait for.
ESSENTIAL = [("killed", "allreduce", "torch"), ("killed", "first step", "mpi"), ("cut", "allreduce", "torch")]
FAULTS = [
    (transport, Fault(kind, moment, CHANCE.randrange(3), CHANCE.uniform(0, LONGEST_DELAY_SECONDS)))
    for kind, moment, transport in [(*pair, name) for pair in EVERYWHERE for name in TRANSPORTS] + SOMEWHERE
]


@pytest.fixture(scope="module")
def report() -> Iterator[list[Entry]]:
    """What these tests saw, written as a table when they are through."""
    entries: list[Entry] = []
    yield entries
    REPORT.parent.mkdir(exist_ok=True)
    REPORT.write_text(table(entries, TIMEOUT_SECONDS))


def strike(cluster: Cluster, fault: Fault, transport: str) -> Verdict:
    """Run a job on three hosts, one rank each, and let ``fault`` strike it."""
    flag = "--mpi" if transport == "mpi" else "--gloo"
    rank = ["python", "-m", "tests.faults.struck", fault.dumps(), "/tmp"]  # noqa: S108 (there)
    environment = {
        "PYTHONPATH": "/checkout",
        "HVDKIT_TIMEOUT_SECONDS": str(TIMEOUT_SECONDS),
        "HVDKIT_START_TIMEOUT_SECONDS": str(START_TIMEOUT_SECONDS),
        "HVDKIT_TRANSPORT": transport,
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "0.5",
        **({"HOROVOD_TIMELINE": "/dev/full"} if fault.kind == "full disk" else {}),
    }
    said = []
    with ExitStack() as stack:
        job = stack.enter_context(cluster.running(["hvdkitrun", flag, "-np", "3", "-H", HOSTS, *rank], **environment))
        assert job.stdout is not None
        for line in job.stdout:
            said.append(line.partition(": ")[2] if line.startswith("[") else line)
            if "STRIKES" in line and fault.kind == "cut":
                stack.enter_context(cluster.cut(WORKERS[fault.rank]))
            if "STRIKES" in line and fault.kind == "launcher killed":
                cluster.shell("pkill -KILL -f '^[^ ]*python[^ ]* /opt/hvdkit/bin/hvdkitrun '", "launcher")
        status: int | None = job.wait()
        ended = time.monotonic()
    if status == OUT_OF_TIME:
        status = None
    cluster.run(["rm", "-f", "/tmp/checkpoint"], host=WORKERS[0])  # noqa: S108 (there)
    left = [f"{what} on {host}" for host, what in cluster.left_on_hosts().items()]
    outcome = Outcome(status, "".join(said), ended, left)
    print(outcome.output)  # shown where the test fails
    return judge(fault, outcome, 3, TIMEOUT_SECONDS, START_TIMEOUT_SECONDS)


@pytest.mark.parametrize(
    ("transport", "fault"),
    [
        pytest.param(
            transport,
            fault,
            id=f"{fault.kind}-{fault.moment}-{transport}",
            marks=[] if (fault.kind, fault.moment, transport) in ESSENTIAL else [pytest.mark.thorough],
        )
        for transport, fault in FAULTS
    ],
)
def test_the_ranks_of_other_hosts_learn_who_is_lost(cluster: Cluster, report, transport, fault):
    verdict = strike(cluster, fault, transport)
    report.append(Entry(transport, fault, verdict))
    assert verdict.problems == ()
    if verdict.noticed_after is not None and fault.kind != "launcher killed" and fault.moment != "init":
        assert WORKERS[fault.rank] in verdict.message
