"""A command line that cannot be meant is refused with what to do about it, before anything starts."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from hvdkit.launch import CommandNotFoundError
from hvdkit.launch.main import check_command
from tests.launch.launching import call, call_bare, environment

PYTHON = [sys.executable, "-c", "pass"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "-np"),
        (["python", "train.py"], "-np"),
        (["-np", "2"], "command"),
        (["-np", "0", *PYTHON], "0 is smaller than 1"),
        (["-np", "two", *PYTHON], "whole number"),
        (["-np", "3", "-H", "localhost:2", *PYTHON], "more processes than there are slots (2)"),
        (["-np", "2", "-H", "localhost", *PYTHON], "'localhost'"),
        (["-np", "2", "-H", "localhost:2,,", *PYTHON], "''"),
        (["-np", "2", "-H", "-oProxyCommand=x:2", *PYTHON], "-H"),
        (["-np", "2", "--hosts=-oProxyCommand=x:2", *PYTHON], "-oProxyCommand=x:2"),
        (["-np", "2", "-H", "localhost:x", *PYTHON], "'localhost:x'"),
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
    (tmp_path / "w.py").write_text(begin)
    (tmp_path / "w.py").chmod(0o755)
    command = [sys.executable, "-m", "hvdkit.launch", "-np", "2", "./w.py", "--fast"]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment(), cwd=tmp_path)
    assert told.returncode == 126
    assert told.stderr.splitlines() == [
        "hvdkitrun: cannot start './w.py': it is executable, but does not begin with #! and a program's path",
        "HINT: a Python script runs as: hvdkitrun -np 2 python ./w.py --fast",
    ]


def test_where_a_script_on_the_path_lies_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "w.py").touch(0o755)
    with pytest.raises(CommandNotFoundError, match=rf"python {re.escape(str(tmp_path))}/w\.py 'a b'$"):
        check_command(["w.py", "a b"], 2)


def test_a_shells_script_without_an_interpreter_is_told_how(tmp_path: Path):
    (tmp_path / "w").write_text("echo ran\n")
    (tmp_path / "w").chmod(0o755)
    with pytest.raises(CommandNotFoundError) as refused:
        check_command([str(tmp_path / "w"), "a b"], 2)
    assert refused.value.status == 126
    assert str(refused.value) == (
        f"cannot start '{tmp_path}/w': it is executable, but does not begin with #! and a program's path\n"
        f"HINT: a shell's script runs as: hvdkitrun -np 2 sh {tmp_path}/w 'a b'"
    )


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
    assert "HINT: " in result.stderr


def test_a_port_without_ssh_behind_it_is_named(controller, tmp_path):
    # Another address of this machine would be local; an ssh that reports a refusal stands in for a remote one.
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\necho "ssh: connect to host $8 port 1: Connection refused" >&2\nexit 255\n')
    ssh.chmod(0o755)
    result = call([controller, "-np", "2", "-H", "remote.invalid:2", "-p", "1"], PATH=f"{tmp_path}:/usr/bin:/bin")
    assert result.status == 1
    assert "cannot reach host remote.invalid by ssh: ssh: connect to host" in result.stderr
    assert "`ssh -o BatchMode=yes -p 1 remote.invalid true`" in result.stderr


def test_a_host_that_does_not_answer_in_time_is_named(tmp_path):
    ssh = tmp_path / "ssh"
    ssh.write_text("#!/bin/sh\nexec sleep 100\n")
    ssh.chmod(0o755)
    flags = ["--gloo", "-np", "2", "-H", "remote.invalid:2", "--start-timeout", "1"]
    result = call(flags, PATH=f"{tmp_path}:/usr/bin:/bin")
    assert result.status == 1
    assert "cannot reach host remote.invalid by ssh: no answer within 1 s" in result.stderr
