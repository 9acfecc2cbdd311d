"""The file with the job's secret: taken only if nobody else can have read or written it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hvdkit.environments.network import LONGEST_SECRET, job_secret
from hvdkit.errors import EnvironmentConflictError

SECRET = "0123456789abcdef" * 2


def secret_of(path: Path) -> bytes | None:
    return job_secret({"HVDKIT_SECRET_FILE": str(path)})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "secret"
    file.write_text(f"{SECRET}\n")
    file.chmod(0o600)
    return file


def test_a_job_needs_no_secret():
    assert job_secret({}) is None
    assert job_secret({"HVDKIT_SECRET_FILE": ""}) is None


def test_the_secret_is_what_is_in_the_file_without_the_end_of_the_line(path):
    assert secret_of(path) == SECRET.encode()
    path.chmod(0o400)
    assert secret_of(path) == SECRET.encode()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666])
def test_a_file_that_others_can_read_or_change_is_refused(path, mode):
    path.chmod(mode)
    with pytest.raises(EnvironmentConflictError, match=r"can be read or changed by others\nHINT: .*chmod 600"):
        secret_of(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_file_of_another_user_is_refused(path):
    os.chown(path, 12345, -1)
    with pytest.raises(EnvironmentConflictError, match="by others"):
        secret_of(path)


@pytest.mark.parametrize("text", ["", " " * 40, "short", "x" * (LONGEST_SECRET + 1)])
def test_a_file_with_too_little_or_too_much_is_refused(path, text):
    path.write_text(text)
    with pytest.raises(EnvironmentConflictError, match=r"from 16 to 4096 bytes\nHINT: make one") as caught:
        secret_of(path)
    assert "xxx" not in str(caught.value)


def test_a_file_that_is_not_there_and_what_is_no_file_are_refused(tmp_path):
    with pytest.raises(EnvironmentConflictError, match="cannot be read: No such file"):
        secret_of(tmp_path / "none")
    with pytest.raises(EnvironmentConflictError, match="is no file"):
        secret_of(tmp_path)
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(EnvironmentConflictError, match="is no file"):
        secret_of(tmp_path / "pipe")
