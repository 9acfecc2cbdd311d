"""Elastic jobs: their ranks come and go, and form generations anew; each job in processes of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# Not imported from there: the modules load frameworks, whose ranks are forks of one process.
SCENARIOS = {
    "scenarios": (
        "rounds on one host", "rounds on two hosts", "holes", "kills on one host", "kills on two hosts",
        "kills over two networks", "failures",
        "process sets",
    ),
    "tensorflow_scenarios": ("functions", "keras models"),
}  # fmt: skip


@pytest.mark.parametrize(("module", "name"), [(module, name) for module, names in SCENARIOS.items() for name in names])
def test_ranks_form_new_generations(module, name):
    command = [sys.executable, "-m", f"tests.elastic.{module}", name]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert done.returncode == 0, done.stderr
