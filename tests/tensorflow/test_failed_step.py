"""A step of TensorFlow updates all variables or none, also where several operations reduce the gradients."""

from __future__ import annotations

import re
import sys

import pytest

from tests.ranks import run_ranks
from tests.tensorflow.test_ops import PRELOAD


@pytest.mark.parametrize(
    ("way", "environment"),
    [
        ("tape", {}),
        ("optimizer", {"KERAS_BACKEND": "tensorflow"}),
        pytest.param("optimizer", {"TF_USE_LEGACY_KERAS": "1"}, marks=pytest.mark.thorough),
    ],
    ids=["tape", "keras", "tf_keras"],
)
def test_a_step_with_a_gradient_that_fails_changes_no_variable(way, environment):
    command = [sys.executable, "-m", "tests.tensorflow.failed_step_program", way]
    _, output = run_ranks(command, 2, "torch", timeout=120, preload=PRELOAD, **environment)
    assert re.search(r"RANK 0 of \d+ variables CHANGED \[\]", output), output
