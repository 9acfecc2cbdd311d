"""Elastic jobs: their ranks come and go, and form generations anew; each job in processes of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from hvdkit.engine.session import generations
from hvdkit.errors import TransportUnavailableError

# Not imported from there: the modules load frameworks, whose ranks are forks of one process.
SCENARIOS = {
    "scenarios": (
        "rounds on one host", "rounds on two hosts", "holes", "kills on one host", "kills on two hosts",
        "kills over two networks", "failures",
        "process sets", "deaths on the way",
    ),
    "tensorflow_scenarios": ("functions", "keras models"),
}  # fmt: skip
STATE_SCENARIOS = {
    "state_scenarios": (
        "kills with a commit in each batch", "kills with a commit in each third batch", "transfers",
        "deaths while forming", "deaths while synchronising", "deaths while synchronising without a commit",
        "deaths while synchronising in a user's way", "deaths in the first generation",
        "failures behind a step", "residuals", "residuals of survivors",
        "15 random events", "15 random events with top-k",
        "150 random events", "150 random events with top-k",
        "a check that fails on rank 0", "a check that fails on rank 1", "leave", "callbacks", "versions",
    ),
    "program_scenarios": ("two functions", "samples"),
    "tensorflow_state_scenarios": ("variables", "fit hvdkit.keras", "fit hvdkit.tensorflow.keras"),
}  # fmt: skip


def test_a_process_without_pytorch_is_told_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(TransportUnavailableError, match=r"needs PyTorch.*, also for TensorFlow[.]\nHINT: pip install"):
        generations.enter_next(None)


def pairs(scenarios):
    return [(module, name) for module, names in scenarios.items() for name in names]


@pytest.mark.parametrize(("module", "name"), pairs(SCENARIOS))
def test_ranks_form_new_generations(module, name):
    run_scenario(module, name)


QUICK = {
    "kills with a commit in each third batch", "transfers", "deaths while forming", "deaths while synchronising",
    "callbacks", "two functions", "variables", "failures behind a step", "residuals",
    "residuals of survivors", "15 random events with top-k",
}  # fmt: skip


@pytest.mark.parametrize(
    ("module", "name"),
    [
        pytest.param(module, name, marks=[] if name in QUICK else pytest.mark.thorough)
        for module, name in pairs(STATE_SCENARIOS)
    ],
)
def test_a_state_outlives_ranks_that_come_and_go(module, name):
    run_scenario(module, name)


def run_scenario(module, name):
    command = [sys.executable, "-m", f"tests.elastic.{module}", name]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert done.returncode == 0, done.stderr
