"""Ranks that are killed or stopped, and hosts that are cut off: the others learn which rank it was, on every host."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.cluster.cluster import ROOT, WORKERS, Cluster
from tests.faults.injection import Fault, Outcome, Verdict, judge
from tests.faults.report import Entry, table

HOSTS = ",".join(f"{host}:1" for host in WORKERS)
TIMEOUT_SECONDS = 5
REPORT = ROOT / "build" / "cluster-faults.md"


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
        "HVDKIT_TRANSPORT": transport,
    }
    said = []
    with ExitStack() as stack:
        job = stack.enter_context(cluster.running(["hvdkitrun", flag, "-np", "3", "-H", HOSTS, *rank], **environment))
        assert job.stdout is not None
        for line in job.stdout:
            said.append(line.partition(": ")[2] if line.startswith("[") else line)
            if fault.kind == "cut" and "STRIKES" in line:
                stack.enter_context(cluster.cut(WORKERS[fault.rank]))
        status = job.wait()
        ended = time.monotonic()
    cluster.run(["rm", "-f", "/tmp/checkpoint"], host=WORKERS[0])  # noqa: S108 (there)
    if (fault.kind, transport) == ("cut", "mpi"):
        # mpirun waits for ever for the host that was cut off, and had to be killed: its folder stays.
        cluster.shell("rm -rf /tmp/ompi.*", "launcher")
    return judge(fault, Outcome(status, "".join(said), ended), ranks=3)


@pytest.mark.parametrize("transport", ["torch", "mpi", "horovod"])
@pytest.mark.parametrize(
    ("kind", "moment"),
    [("killed", "allreduce"), ("killed", "first step"), ("stopped", "allreduce"), ("cut", "allreduce")],
)
def test_the_ranks_of_other_hosts_learn_who_is_lost(cluster: Cluster, report, kind, moment, transport):
    fault = Fault(kind, moment, rank=1, delay=0.01)
    verdict = strike(cluster, fault, transport)
    report.append(Entry(transport, fault, verdict))
    assert verdict.problems == ()
