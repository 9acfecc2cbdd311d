"""Kernels of Triton, run by its interpreter and compiled, in processes of their own: it decides which when imported."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

from tests.ranks import ROOT

SECONDS = 300


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton")
def test_kernels_give_the_bits_of_pytorchs_operations():
    assert "give the same" in run("kernels_beside_torch", "cpu", TRITON_INTERPRET="1")


def test_kernels_are_compiled_for_gpus():
    assert "take, sm_90: " in run("compiled_kernels")


def run(program: str, *arguments: str, **variables: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, "-m", f"tests.transports.{program}", *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
