"""Elastic jobs: their ranks come and go, and form generations anew; each job in processes of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.elastic.scenarios import SCENARIOS


@pytest.mark.parametrize("name", SCENARIOS)
def test_ranks_form_new_generations(name):
    command = [sys.executable, "-m", "tests.elastic.scenarios", name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
