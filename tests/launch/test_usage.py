"""A command line that cannot be meant is refused with what to do about it, before anything starts."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from hvdkit.launch import CommandNotFoundError
from hvdkit.launch.main import check_command
from tests.launch.launching import call, call_bare, run_to_end, write_program

PYTHON = [sys.executable, "-c", "pass"]
NO_SIZE = (
    "hvdkitrun: the number of processes, -np, is missing before the command\n"
    "HINT: hvdkitrun -np 4 python train.py starts four; flags after the command are the script's\n"
)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], NO_SIZE),
        (["python", "train.py"], NO_SIZE),
        (["-np", "2"], "hvdkitrun: the command for the processes is missing\nHINT: hvdkitrun -np 4 python train.py\n"),
        (["-np", "0", *PYTHON], "0 is smaller than 1"),
        (["-np", "two", *PYTHON], "whole number"),
        (["-np", "3", "-H", "localhost:2", *PYTHON], "more processes than there are slots (2)"),
        (["-np", "2", "-H", "localhost", *PYTHON], "'localhost'"),
        (["-np", "2", "-H", "localhost:2,,", *PYTHON], "''"),
        (["-np", "2", "--hosts=-oProxyCommand=x:2", *PYTHON], "-oProxyCommand=x:2"),
        (["-np", "2", "--hostfile", "/does/not/exist", *PYTHON], "/does/not/exist"),
        (["-np", "2", "--mpi", "--gloo", *PYTHON], "--gloo"),
        (["-np", "2", "--no-such-flag", *PYTHON], "--no-such-flag"),
        (["-np", "2", "--mpi", "--mpi-args", "'open", *PYTHON], "--mpi-args"),
        (["-np", "2", "--gloo", "-H", "localhost:1,host.invalid:1", "--start-timeout", "x", *PYTHON], "number"),
    ],
)
def test_usage_errors_end_with_status_2_and_a_hint(arguments, words):
    result = call_bare(*arguments)
    assert result.status == 2
    assert words in result.stderr
    assert "HINT: " in result.stderr
    assert "Traceback" not in result.stderr


def test_a_program_that_is_not_there_is_told_once(controller):
    result = call_bare(controller, "-np", "3", "no-such-program")
    assert result.status == 127
    assert result.stderr.count("no-such-program") == 1


@pytest.mark.parametrize("begin", ["import sys\n", "", "\ufeff#!/usr/bin/env python\n"], ids=["code", "empty", "mark"])
def test_an_executable_script_without_an_interpreter_is_told_how(begin: str, tmp_path: Path):
    write_program(tmp_path / "w.py", begin)
    refused = run_to_end([sys.executable, "-m", "hvdkit.launch", "-np", "2", "./w.py", "--fast"], cwd=tmp_path)
    assert refused.status == 126
    assert refused.stderr.splitlines() == [
        "hvdkitrun: cannot start './w.py': it is executable, but does not begin with #! and a program's path",
        "HINT: a Python script runs as: hvdkitrun -np 2 python ./w.py --fast",
    ]


def test_a_script_that_is_started_without_python_is_told_how():
    refused = call_bare("-np", "2", "w.py", "--fast")
    assert refused.status == 127
    assert refused.stderr.splitlines() == [
        "hvdkitrun: cannot find the program 'w.py', or it is not executable",
        "HINT: check its name and PATH; a Python script runs as: hvdkitrun -np 2 python w.py --fast",
    ]


@pytest.mark.parametrize(("name", "text", "runs"), [("w.py", "", "python"), ("w", "echo ran\n", "sh")])
def test_where_a_script_on_the_path_lies_is_told(name, text, runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    path = write_program(tmp_path / name, text)
    with pytest.raises(CommandNotFoundError, match=rf"runs as: .* {runs} {re.escape(str(path))} 'a b'$") as refused:
        check_command([name, "a b"], 2)
    assert refused.value.status == 126


@pytest.mark.parametrize(
    ("name", "begin"), [("w.py", b"#!/bin/sh\n"), ("w.py", b"\x7fELF\2\1\1\0\0"), ("w", b"\x7fELF\2\1\1\0\0")]
)
def test_what_may_start_is_not_refused(name: str, begin: bytes, tmp_path: Path):
    program = tmp_path / name
    program.write_bytes(begin)
    program.chmod(0o755)
    check_command([str(program)], 2)


def test_version_and_help():
    import hvdkit

    assert call_bare("--version").stdout.strip() == hvdkit.__version__
    assert "--fusion-threshold-mb" in call_bare("--help").stdout


@pytest.mark.timeout(90)
def test_a_host_that_cannot_be_reached_is_named(controller):
    flags = [controller, "-np", "2", "-H", "localhost:1,host.invalid:1", "--start-timeout", "20"]
    result = call(flags)
    assert result.status == 1
    assert "cannot reach host host.invalid by ssh: " in result.stderr
    hint = "HINT: make `ssh -o BatchMode=yes host.invalid true` work from this host without a prompt"
    assert f"\n{hint}; --ssh-port and --start-timeout may help\n" in result.stderr


REFUSES = 'echo "ssh: connect to host $8 port 1: Connection refused" >&2\nexit 255'


@pytest.mark.parametrize(
    ("program", "flags", "why"),
    [
        (REFUSES, ["--mpi", "-p", "1"], "ssh: connect to host"),
        (REFUSES, ["--gloo", "-p", "1"], "ssh: connect to host"),
        ("exec sleep 100", ["--gloo", "--start-timeout", "1"], "no answer within 1 s"),
    ],
)
def test_a_host_without_ssh_or_that_does_not_answer_is_named(tmp_path, program, flags, why):
    # Another address of this machine would be local; a program in place of ssh stands in for a remote one.
    write_program(tmp_path / "ssh", f"#!/bin/sh\n{program}\n")
    result = call([*flags, "-np", "2", "-H", "remote.invalid:2"], PATH=f"{tmp_path}:/usr/bin:/bin")
    assert result.status == 1
    assert f"cannot reach host remote.invalid by ssh: {why}" in result.stderr
    assert "-p" not in flags or "`ssh -o BatchMode=yes -p 1 remote.invalid true`" in result.stderr
