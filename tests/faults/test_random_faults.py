"""Some of the faults of tests/faults/report.py, always the same ones; that runs hundreds."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import tempfile

import pytest

from tests.faults import jobs
from tests.faults.injection import Fault, judge, random_faults
from tests.faults.jobs import START_TIMEOUT_SECONDS, TIMEOUT_SECONDS, run_with_fault

SHARED_MEMORY = "/dev/shm"  # noqa: S108 (a look)
RANKS = 3
FAULTS = list(itertools.islice(random_faults(2026, RANKS), 18))


# The first of each kind; `make test-all` has all of them.
ESSENTIAL = {[one.kind for one in FAULTS].index(kind) for kind in {one.kind for one in FAULTS}}


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(number, id=f"{one.kind}-{one.moment}", marks=[] if number in ESSENTIAL else [pytest.mark.thorough])
        for number, one in enumerate(FAULTS)
    ],
)
def test_a_fault_ends_as_it_must(number):
    fault = FAULTS[number]
    outcome = run_with_fault(fault, ("torch", "mpi")[number % 2], RANKS)
    problems = judge(fault, outcome, RANKS, TIMEOUT_SECONDS, START_TIMEOUT_SECONDS).problems
    assert problems == (), f"{fault}\n{outcome.output}"


def test_a_job_that_nothing_strikes_ends_well_with_nothing_to_notice():
    fault = Fault("none", "allreduce", 1, 0.0)
    verdict = judge(fault, run_with_fault(fault, "torch", RANKS), RANKS, TIMEOUT_SECONDS, START_TIMEOUT_SECONDS)
    assert (verdict.problems, verdict.noticed_after) == ((), None)


def test_what_stays_behind_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "SETTLE_SECONDS", 0.1)
    before = set(os.listdir(SHARED_MEMORY))
    # Tests beside this one leave things there for a moment, too.
    assert not any(str(tmp_path) in one for one in jobs.left_behind(str(tmp_path), before))
    with subprocess.Popen([sys.executable, "-c", "input()", str(tmp_path)], stdin=subprocess.PIPE) as process:
        left = jobs.left_behind(str(tmp_path), before)
        process.kill()
    assert any(one.startswith(f"{process.pid} ") for one in left)
    with tempfile.NamedTemporaryFile(dir=SHARED_MEMORY) as file:
        assert file.name in jobs.left_behind(str(tmp_path), before)
