"""SIGTERM to hvdkitrun gives every rank the same time to save, whatever starts the ranks and on whatever hosts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hvdkit.launch.options import parse
from tests.launch.launching import PATIENCE_SECONDS, RANK, check_gone, marked, marker, write_program
from tests.launch.test_ssh import SSH
from tests.ranks import PIPES, rank_environment
from tests.waiting import until

SAVING_SECONDS = 0.6  # longer than mpirun's own patience, a quarter of a second
# A rank that counts its SIGTERMs, saves the count, and ends; its arguments: a folder, the seconds to save, a marker.
SAVES = """
folder, seconds, count = sys.argv[1], float(sys.argv[2]), 0

def save(*_):
    global count
    count += 1
    time.sleep(seconds)
    with open(f"{folder}/saved.{rank}", "a") as file:
        file.write(f"{count}\\n")
    sys.exit(0)

signal.signal(signal.SIGTERM, save)
"""
READY = """
open(f"{folder}/ready.{rank}", "w").close()
while True:
    time.sleep(0.05)
"""
# As a data loader of PyTorch does: the loss of a child is an error, also while the rank saves.
LOADS = """
import subprocess
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", sys.argv[3]])

def lose(*_):
    if child.poll() is not None:
        raise RuntimeError("a child that loads data was killed")

signal.signal(signal.SIGCHLD, lose)
"""


class Job:
    """hvdkitrun with ranks that save; ``code`` runs in them before they are ready."""

    def __init__(self, folder: Path, *flags: str, code: str = "", saving: float = SAVING_SECONDS, script: str = ""):
        self.folder, self.mark = folder, marker()
        rank = [sys.executable, "-c", RANK + SAVES + code + READY, str(folder), str(saving), self.mark]
        command = [*(["sh", "-c", script, "sh"] if script else []), *rank]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "hvdkit.launch", *flags, *command],
            env=rank_environment(PATH=f"{folder}:{os.environ['PATH']}"),
            **PIPES,
        )

    def wait_for_ranks(self, size: int) -> None:
        until(lambda: len(list(self.folder.glob("ready.*"))) == size, what="all ranks run")

    def end(self, *signals: int, pause: float = 0.0) -> tuple[int, str, float]:
        """Send signals; the exit status, the output and how long that took."""
        began = time.monotonic()
        for number in signals:
            self.process.send_signal(number)
            time.sleep(pause)
        output, _ = self.process.communicate(timeout=PATIENCE_SECONDS)
        return self.process.returncode, output, time.monotonic() - began

    def saved(self) -> list[str]:
        return [path.read_text() for path in sorted(self.folder.glob("saved.*"))]


def assert_all_save(job: Job, size: int = 2) -> None:
    job.wait_for_ranks(size)
    status, output, _ = job.end(signal.SIGTERM)
    assert job.saved() == ["1\n"] * size, output
    assert (status, output.splitlines()[-1]) == (143, "hvdkitrun: ended all ranks after SIGTERM"), output
    check_gone(job.mark)


def test_each_rank_gets_sigterm_once_and_saves(controller, tmp_path):
    assert_all_save(Job(tmp_path, controller, "-np", "2", code="import hvdkit.torch as hvd\nhvd.init()\n"))


def test_a_ranks_children_get_no_sigterm_while_it_saves(controller, tmp_path):
    assert_all_save(Job(tmp_path, controller, "-np", "2", code=LOADS))


def test_what_a_shell_leaves_behind_gets_sigterm_and_saves(controller, tmp_path):
    assert_all_save(Job(tmp_path, controller, "-np", "2", script='true; "$@"; true'))


def test_ranks_on_other_hosts_save_too(controller, tmp_path):
    write_program(tmp_path / "ssh", SSH)
    interface = ["--network-interfaces", "lo"] if controller == "--gloo" else []
    assert_all_save(Job(tmp_path, controller, "-np", "3", "-H", "localhost:1,far.invalid:2", *interface), 3)


def test_ranks_save_after_another_has_ended_and_then_the_job_ends(controller, tmp_path):
    job = Job(tmp_path, controller, "-np", "2", "--stop-grace", "600", code="if rank == '1':\n    sys.exit(0)\n")
    job.wait_for_ranks(1)
    until(lambda: len(marked(job.mark)) == 1, what="rank 1 has ended")
    status, output, _ = job.end(signal.SIGTERM)
    assert job.saved() == ["1\n"]
    assert (status, output.splitlines()[-1]) == (143, "hvdkitrun: ended all ranks after SIGTERM"), output


def test_after_the_grace_period_ranks_are_killed(controller, tmp_path):
    job = Job(tmp_path, controller, "-np", "2", "--stop-grace", "0.5", code=LOADS, saving=600)
    job.wait_for_ranks(2)
    assert len(marked(job.mark)) == 4
    status, output, seconds = job.end(signal.SIGTERM)
    assert (status, output.splitlines()[-1]) == (143, "hvdkitrun: ended all ranks after SIGTERM")
    assert 0.5 <= seconds < 10.0  # the grace period that is not asked for
    assert job.saved() == []
    check_gone(job.mark)


@pytest.mark.parametrize("hosts", [[], ["-H", "localhost:1,far.invalid:1", "--network-interfaces", "lo"]])
def test_a_second_sigterm_ends_all_at_once(controller, hosts, tmp_path):
    if hosts and controller == "--mpi":
        pytest.skip("mpirun's own ssh")
    write_program(tmp_path / "ssh", SSH)
    job = Job(tmp_path, controller, "-np", "2", "--stop-grace", "600", *hosts, saving=600)
    job.wait_for_ranks(2)
    status, _, _ = job.end(signal.SIGTERM, signal.SIGTERM, pause=0.5)
    assert status == 143
    until(lambda: marked(job.mark) == [], what="all ranks end")


@pytest.mark.parametrize("seconds", [0.05, 0.4])
def test_a_job_that_starts_ends_as_well(controller, tmp_path, seconds):
    job = Job(tmp_path, controller, "-np", "2")
    time.sleep(seconds)
    job.end(signal.SIGTERM)
    check_gone(job.mark)


def test_the_grace_period_is_a_flag_and_a_setting(monkeypatch):
    command = ["-np", "2", "python"]
    assert parse(command).stop_grace == 10
    monkeypatch.setenv("HVDKIT_STOP_GRACE_SECONDS", "4")
    assert parse(command).stop_grace == 4
    assert parse(["--stop-grace", "0", *command]).stop_grace == 0
