"""How long a job of ranks may take: as long as it goes on, and no longer than that."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from tests import on_ranks, ranks

HANGS = "import time; time.sleep(600)"


def test_a_job_that_goes_on_is_waited_for():
    command = [sys.executable, "-c", "import time; time.sleep(2); print('through')"]
    progress = itertools.count().__next__
    assert ranks.run_ranks(command, 1, "torch", timeout=0.2, progress=progress) == (0, "through\n")


def test_a_job_that_does_not_is_killed():
    reached = iter([0, 1, 2])
    with pytest.raises(subprocess.TimeoutExpired):
        ranks.run_ranks([sys.executable, "-c", HANGS], 1, "torch", timeout=0.2, progress=lambda: next(reached, 3))
    assert next(reached, None) is None


def test_a_job_that_hangs_runs_once_and_what_had_passed_is_passed(monkeypatch: pytest.MonkeyPatch):
    jobs = []

    def hang(command: list[str], size: int, *arguments: object, **options: object) -> NoReturn:
        jobs.append(command)
        for rank in range(size):
            Path(command[-1], f"{rank}.json").write_text('{"case_passes": "passed"}')
        raise subprocess.TimeoutExpired(command, 1.0, output=b"the last words")

    monkeypatch.setattr(on_ranks, "case_names", lambda module: ["case_passes", "case_hangs", "case_after_it"])
    monkeypatch.setattr(on_ranks, "run_ranks", hang)
    cases = on_ranks.RankedCases("any.module")
    cases.check("case_passes", 2, "mpi")
    for case in ("case_hangs", "case_after_it"):
        with pytest.raises(AssertionError, match=r"(?s)rank 1: did not reach this case.*no case ended.*last words"):
            cases.check(case, 2, "mpi")
    assert len(jobs) == 1
