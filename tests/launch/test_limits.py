"""A limit of the system is told in one sentence with a hint, whatever runs into it."""

from __future__ import annotations

import errno
import os
import re
import sys

import pytest

from hvdkit.environments import limits
from hvdkit.launch import main
from hvdkit.launch.mpirun_output import find_shortage
from tests.launch.launching import argv, run_to_end

JOINS = "import hvdkit.torch as hvd; hvd.init()"


def run_with_files(files: int, *command: str) -> tuple[int, list[str]]:
    result = run_to_end(["sh", "-c", f'ulimit -n {files}; exec "$@"', "sh", *command])
    return result.status, result.stderr.splitlines()


def launch(controller: str, size: int = 2, code: str = JOINS) -> list[str]:
    return argv([controller, "-np", str(size)], code)


@pytest.mark.parametrize("files", [9, 24])
def test_too_few_open_files_are_one_sentence_before_anything_starts(controller, files):
    status, lines = run_with_files(files, *launch(controller))
    fact = f"too few files may be open: the limit of a process is {files} (ulimit -n), and 32 are needed"
    assert lines == [f"hvdkitrun: cannot start 2 ranks: {fact}", "HINT: raise it: ulimit -n 1024"]
    assert status == 1


@pytest.mark.essential(controller="--gloo")
def test_the_limit_of_files_that_is_said_to_be_enough_is_enough(controller):
    assert run_with_files(32, *launch(controller))[0] == 0


@pytest.mark.essential(controller="--mpi")
def test_a_rank_with_too_few_open_files_says_so(controller):
    command = ["sh", "-c", f'ulimit -n 20; exec "$0" -c "{JOINS}"', sys.executable]
    status, lines = run_with_files(1024, *launch(controller)[:-3], *command)
    assert status == 1
    fact = r"TransportUnavailableError: rank \d cannot start: too few files may be open: .* 20 \(ulimit -n\)"
    assert any(re.search(fact, line) for line in lines), lines
    assert "HINT: raise it: ulimit -n 1024" in lines


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.EMFILE, os.strerror(errno.EMFILE)), "ulimit -n"),
        (BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)), "ulimit -u"),
        (RuntimeError("can't start new thread"), "ulimit -u"),
        (RuntimeError("[enforce fail at loop.cc:105] fd_ != -1. epoll_create: Too many open files"), "ulimit -n"),
        (OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)), "ulimit -v"),
        (MemoryError(), "ulimit -v"),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/full/x"), "no room left for /full/x"),
        (
            FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']"),
            "no folder for temporary files is writable\n"
            "HINT: name one with TMPDIR (No usable temporary directory found in ['/tmp'])",
        ),
    ],
)
def test_each_limit_has_its_sentence_in_hvdkitrun(error, words, monkeypatch, capsys):
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(main, "assign_slots", fail)
    told = limits.exhausted(error)
    assert told is not None
    assert words in told
    assert "\nHINT: " in told
    if isinstance(error, OSError):
        assert main.main(["-np", "2", "python"]) == 1
        assert capsys.readouterr().err == f"hvdkitrun: cannot start the job: {told}\n"


def test_other_errors_are_no_limits():
    for error in (OSError(errno.ENOENT, "x"), RuntimeError("x"), ValueError("Too many open files"), KeyError(3)):
        assert limits.exhausted(error) is None


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("[vm:1] PMIX ERROR: PMIX_ERR_SYS_LIMITS_PIPES in file iof_base_setup.c at line 119", "ulimit -n"),
        ("[vm:1] prte_mca_oob_tcp_component_init: socket() failed: Too many open files (24)", "ulimit -n"),
        ("  pmix_progress_thread_start failed\n  --> Returned value -1 instead of PMIX_SUCCESS", "ulimit -u"),
        (
            "PMIx detected a call to mkdir was unable to create the desired directory:\n\n"
            "  Directory: /full/hvdkit-x/ompi.1/0\n  Error:     No space left on device\n",
            "no room left for /full/hvdkit-x/ompi.1/0",
        ),
    ],
)
def test_what_mpirun_says_of_a_limit_becomes_a_sentence(said, words):
    told = find_shortage(said.encode())
    assert told is not None
    assert words in told
    assert find_shortage(b"PRTE has lost communication with a remote daemon.") is None
