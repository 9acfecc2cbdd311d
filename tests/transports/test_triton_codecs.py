"""Kernels of Triton, run by its interpreter and compiled, in processes of their own: it decides which when imported."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from tests.launch.launching import run_to_end

SECONDS = 300


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton")
def test_kernels_give_the_bits_of_pytorchs_operations():
    assert "give the same" in run("kernels_beside_torch", "cpu", TRITON_INTERPRET="1")


def test_kernels_are_compiled_for_gpus():
    assert "take, sm_90: " in run("compiled_kernels")


def run(program: str, *arguments: str, **variables: str) -> str:
    done = run_to_end([sys.executable, "-m", f"tests.transports.{program}", *arguments], SECONDS, **variables)
    assert done.status == 0, done.stdout + done.stderr
    return done.stdout
