"""Elastic jobs: their ranks come and go, and form generations anew; each job in processes of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.elastic import scenarios, tensorflow_scenarios


@pytest.mark.parametrize(
    ("module", "name"),
    [(module.__name__, name) for module in (scenarios, tensorflow_scenarios) for name in module.SCENARIOS],
)
def test_ranks_form_new_generations(module, name):
    done = subprocess.run(
        [sys.executable, "-m", module, name], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
