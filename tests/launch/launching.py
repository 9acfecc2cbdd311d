"""Start ``hvdkitrun`` as a user does, and find what it left behind."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from hvdkit.launch import worker
from tests.ranks import PIPES, ROOT, rank_environment
from tests.waiting import until

# Far longer than anything here takes; a test that needs it has failed.
PATIENCE_SECONDS = 60
DYING_SECONDS = 2
# The beginning of a rank's code, however it is started.
RANK = "import os, signal, sys, time; rank = os.environ.get('HVDKIT_RANK') or os.environ['OMPI_COMM_WORLD_RANK']\n"


@dataclass
class Result:
    """The exit status and the output of a call of hvdkitrun."""

    status: int
    stdout: str
    stderr: str

    @property
    def last_words(self) -> str:
        return self.stderr.strip().splitlines()[-1]


def argv(flags: list[str], code: str, *arguments: str) -> list[str]:
    """Return the command that runs hvdkitrun with flags and a piece of Python."""
    return [sys.executable, "-m", "hvdkit.launch", *flags, sys.executable, "-c", code, *arguments]


def call(flags: list[str], code: str = "pass", *arguments: str, **extra: str) -> Result:
    """Run hvdkitrun with a piece of Python to its end."""
    return run_to_end(argv(flags, code, *arguments), **extra)


def call_bare(*arguments: str, seconds: float = PATIENCE_SECONDS, **extra: str) -> Result:
    """Run hvdkitrun with exactly these arguments. ``seconds``: the most that it may take."""
    return run_to_end([sys.executable, "-m", "hvdkit.launch", *arguments], seconds, **extra)


def run_to_end(command: list[str], seconds: float = PATIENCE_SECONDS, cwd: Path = ROOT, **extra: str) -> Result:
    """Run any command to its end, in the environment of a user with these variables."""
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=seconds, check=False, cwd=cwd, env=rank_environment(**extra)
    )
    return Result(done.returncode, done.stdout, done.stderr)


def outputs_of(processes: list[subprocess.Popen[str]], seconds: float = PATIENCE_SECONDS) -> list[tuple[str, str]]:
    """Return the output of processes until they end. Processes that do not end in time are killed."""
    try:
        return [process.communicate(timeout=seconds) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.communicate()


def marker() -> str:
    """Return an argument that no other process has."""
    return f"marker-{secrets.token_hex(8)}"


def marked(mark: str) -> list[psutil.Process]:
    """Return all living processes with this argument but launchers and workers, which have it too."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        line = process.info["cmdline"] or []
        launcher = {"hvdkit.launch", worker.__file__} & set(line) or any(
            os.path.basename(word) in ("mpirun", "prterun") for word in line[:1]
        )
        if mark in line and not launcher and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


def check_gone(mark: str) -> None:
    """Assert that no process with this argument is left, after at most DYING_SECONDS."""
    until(lambda: not marked(mark), DYING_SECONDS, lambda: f"the end of {marked(mark)}")


def write_program(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


@contextmanager
def running(flags: list[str], code: str, *arguments: str, **extra: str):
    """Start a launcher and yield its process, which is killed at the end if it still runs."""
    process = subprocess.Popen(
        argv(flags, code, *arguments),
        env=rank_environment(**extra),
        start_new_session=True,
        **{**PIPES, "stderr": subprocess.PIPE},
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()
