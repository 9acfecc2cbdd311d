"""Ranks that are forked from a process with the framework loaded are what ranks started alone are."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import psutil
import pytest

from tests import preloaded
from tests.ranks import ROOT, rank_environment, start_ranks
from tests.waiting import until

PRELOAD = ("pytest",)


def started(how: str) -> list[subprocess.Popen[str]]:
    return start_ranks([sys.executable, "-m", "tests.preloaded_rank", how], 2, "torch", preload=PRELOAD)


@pytest.mark.parametrize(("how", "status"), [("0", 0), ("7", 7), ("killed", -signal.SIGKILL)])
def test_a_rank_is_given_what_its_client_has_and_the_client_ends_as_it_does(how, status):
    processes = started(how)
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [status, status], outputs
    told = [json.loads(output) for output in outputs]
    assert [one["rank"] for one in told] == ["0", "1"]
    assert all(one["folder"] == str(ROOT) and one["arguments"] == [how] and one["loaded"] for one in told)
    assert len({one["hash"] for one in told}) == 2, "ranks share the hashes of strings"


def test_processes_of_one_run_share_what_ranks_are_forked_from():
    servers = preloaded.Servers()
    try:
        program = f"from tests import preloaded; print(*preloaded._addresses({PRELOAD}, ()))"
        environment = rank_environment(**{preloaded.ASKED: servers.listen()})
        command = [sys.executable, "-c", program]
        told = {subprocess.check_output(command, env=environment, text=True, cwd=ROOT) for _ in range(2)}
        assert told == {" ".join(servers.started(PRELOAD, ())) + "\n"}
    finally:
        servers.close()


def test_a_program_runs_as_python_runs_it():
    program = "import sys, pytest; print(__name__, sys.argv, sys.modules['__main__'].sys is sys)"
    [process] = start_ranks([sys.executable, "-c", program, "one"], 1, "torch", preload=PRELOAD)
    assert process.communicate(timeout=60)[0] == "__main__ ['-c', 'one'] True\n"


def test_a_rank_has_the_name_of_who_started_it():
    [process] = start_ranks([sys.executable, "-m", "tests.preloaded_rank", "waits"], 1, "torch", preload=PRELOAD)
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
