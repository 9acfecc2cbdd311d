"""A job of ranks may take as long as it goes on, and a rank that is forked is what one is that was started alone."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import psutil
import pytest

from tests import on_ranks, preloaded, ranks
from tests.waiting import until

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


PRELOAD = ("pytest",)


def started(how: str) -> list[subprocess.Popen[str]]:
    return ranks.start_ranks([sys.executable, "-m", "tests.preloaded_rank", how], 2, "torch", preload=PRELOAD)


@pytest.mark.parametrize(("how", "status"), [("0", 0), ("7", 7), ("killed", -signal.SIGKILL)])
def test_a_rank_is_given_what_its_client_has_and_the_client_ends_as_it_does(how, status):
    processes = started(how)
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [status, status], outputs
    told = [json.loads(output) for output in outputs]
    assert [one["rank"] for one in told] == ["0", "1"]
    assert all(one["folder"] == str(ranks.ROOT) and one["arguments"] == [how] and one["loaded"] for one in told)
    assert len({one["hash"] for one in told}) == 2, "ranks share the hashes of strings"


def test_processes_of_one_run_share_what_ranks_are_forked_from():
    servers = preloaded.Servers()
    try:
        program = f"from tests import preloaded; print(*preloaded._addresses({PRELOAD}, ()))"
        environment = ranks.rank_environment(**{preloaded.ASKED: servers.listen()})
        command = [sys.executable, "-c", program]
        told = {subprocess.check_output(command, env=environment, text=True, cwd=ranks.ROOT) for _ in range(2)}
        assert told == {" ".join(servers.started(PRELOAD, ())) + "\n"}
    finally:
        servers.close()


def test_a_program_runs_as_python_runs_it():
    program = "import sys, pytest; print(__name__, sys.argv, sys.modules['__main__'].sys is sys)"
    [process] = ranks.start_ranks([sys.executable, "-c", program, "one"], 1, "torch", preload=PRELOAD)
    assert process.communicate(timeout=60)[0] == "__main__ ['-c', 'one'] True\n"


def test_a_rank_has_the_name_of_who_started_it():
    [process] = ranks.start_ranks([sys.executable, "-m", "tests.preloaded_rank", "waits"], 1, "torch", preload=PRELOAD)
    try:
        assert process.stdout is not None
        assert psutil.Process(json.loads(process.stdout.readline())["pid"]).name() == preloaded.rank_name()
    finally:
        process.kill()
        process.communicate()


def test_a_rank_does_not_outlive_its_client():
    processes = started("waits")
    assert all(process.stdout is not None for process in processes)
    pids = [json.loads(process.stdout.readline())["pid"] for process in processes]
    for process in processes:
        process.kill()
        process.communicate()
    until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids), what=f"the end of {pids}")
