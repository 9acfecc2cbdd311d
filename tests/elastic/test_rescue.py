"""A job that must end rescues its state, from which the next one goes on to the same bits."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.launch.launching import run_to_end
from tests.ranks import PIPES, rank_environment
from tests.waiting import until

PROGRAM = [str(Path(__file__).with_name("rescue_program.py"))]
HVDKITRUN = [sys.executable, "-m", "hvdkit.launch", "-np", "2"]
ELASTIC = [*HVDKITRUN, "--min-np", "2"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
STEPS = "60"


def digests(output: str) -> set[str]:
    assert output.count("digest ") == 2, output
    return set(re.findall(r"digest (\w+)", output))


@pytest.fixture(scope="module")
def expected() -> set[str]:
    done = run_to_end([*HVDKITRUN, "--gloo", sys.executable, *PROGRAM, STEPS, "-1"])
    assert len(digests(done.stdout)) == 1
    return digests(done.stdout)


def begins(output: str) -> set[int]:
    return {int(step) for step in re.findall(r"begins with step (\d+)", output)}


def test_torchruns_restart_goes_on_with_the_step_in_which_a_rank_was_killed(expected, tmp_path):
    command = [*TORCHRUN, "--max-restarts", "1", *PROGRAM, STEPS, "20"]
    done = run_to_end(command, HVDKIT_RESCUE=str(tmp_path), OMP_NUM_THREADS="1")
    assert done.status == 0, done.stderr
    assert begins(done.stdout) == {0, 20}
    assert digests(done.stdout) == expected
    assert re.search(
        r"The state is rescued in \S+/state-0-0+20-0+\.hvdkit: the next start goes on from there", done.stderr
    )
    assert list(tmp_path.glob("state-*")) == []


@pytest.mark.parametrize(
    ("command", "number"),
    [
        (ELASTIC, signal.SIGTERM),
        (ELASTIC, signal.SIGKILL),
        (ELASTIC, signal.SIGUSR1),
        ([*HVDKITRUN, "--gloo"], signal.SIGTERM),
    ],
    ids=["SIGTERM to an elastic job", "SIGKILL of the launcher", "all hosts leave", "SIGTERM to a job"],
)
def test_a_job_that_is_ended_goes_on_at_the_next_start(expected, tmp_path, command, number):
    environment = rank_environment(OMP_NUM_THREADS="1")
    command = [*command, "--rescue", str(tmp_path)]
    program = [sys.executable, *PROGRAM]
    with subprocess.Popen([*command, *program, "100000", "-1"], env=environment, **PIPES) as process:
        while "is at step 10" not in process.stdout.readline():
            pass
        if number == signal.SIGUSR1:
            children = psutil.Process(process.pid).children()
            next(child for child in children if "agent.py" in " ".join(child.cmdline())).send_signal(number)
        else:
            process.send_signal(number)
        assert process.wait(30) == (1 if number == signal.SIGUSR1 else -number if number == signal.SIGKILL else 143)
        output = process.stdout.read()
    assert ("the job ended: all hosts leave" in output) == (number == signal.SIGUSR1)
    assert "digest" not in output
    until(lambda: list(tmp_path.glob("state-*.hvdkit")), 10)  # the ranks outlive a launcher that is killed
    (path,) = tmp_path.glob("state-*")
    steps = int(path.name.split("-")[2])
    assert steps >= 10
    done = run_to_end([*command, *program, str(steps + 5), "-1"], OMP_NUM_THREADS="1")
    assert done.status == 0, done.stderr
    assert begins(done.stdout) == {steps}
    plain = run_to_end([*HVDKITRUN, "--gloo", *program, str(steps + 5), "-1"], OMP_NUM_THREADS="1")
    assert digests(done.stdout) == digests(plain.stdout)
    assert os.listdir(tmp_path) == [".lock"]
