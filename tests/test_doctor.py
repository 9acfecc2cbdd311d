"""``hvdkit doctor`` says what is there, what is not, and what to do about it."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from hvdkit import command
from hvdkit.launch import doctor
from tests.ranks import ROOT, rank_environment


def run(**environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "import sys; from hvdkit.command import main; sys.exit(main(['doctor']))"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=ROOT,
        env=rank_environment(**environment),
    )


def test_it_finds_what_the_tests_need():
    done = run(TF_CPP_MIN_LOG_LEVEL="2", CUDA_VISIBLE_DEVICES="-1")
    assert done.returncode == 0, done.stdout + done.stderr
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


@pytest.mark.parametrize(
    ("program", "told"),
    [
        (
            "raise ImportError('libmpi.so.40: no file')",
            "cannot be imported: ImportError: libmpi.so.40: no file",
        ),
        ("import os; os.abort()", "cannot be imported: "),
        ("import time; time.sleep(60)", "cannot be imported within 1 s"),
    ],
)
def test_what_is_installed_but_broken_is_told(program, told, monkeypatch):
    monkeypatch.setattr(doctor, "PROBE_SECONDS", 1 if "sleep" in program else 60)
    answer = doctor.probe({"numpy": program})["numpy"]
    assert isinstance(answer, str)
    assert told in answer


def test_without_a_framework_or_a_transport_it_says_what_to_install():
    findings = [*doctor._frameworks(*["not installed"] * 3), *doctor._transports(*["not installed"] * 3)]
    told = {finding.subject: finding for finding in findings}
    assert told["PyTorch"].good is False
    assert "pip install" in told["PyTorch"].hint
    assert told["MPI"].good is False
    assert "pip install" in told["MPI"].hint


def test_gpus_without_nccl_are_told():
    torch = {"version": "2.13.0", "gloo": True, "nccl": False, "gpus": 2}
    [nccl] = [one for one in doctor._transports(torch, "not installed", "not installed") if one.subject == "NCCL"]
    assert nccl.good is False
    assert "CUDA" in nccl.hint
    assert "2 GPUs" in str(doctor._frameworks(torch, "not installed", "not installed")[0])
