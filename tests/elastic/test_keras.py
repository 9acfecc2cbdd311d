"""hvd.elastic with Keras and TensorFlow under hvdkitrun: killed ranks are replaced, and all hold the same bits."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.launch.launching import call_bare, run_to_end

PROGRAM = str(Path(__file__).with_name("keras_program.py"))
FIT_PROGRAM = str(Path(__file__).with_name("keras_fit_program.py"))
RESTORE_PROGRAM = str(Path(__file__).with_name("restore_program.py"))


@pytest.mark.parametrize(
    ("kind", "environment"),
    [
        ("keras", {"KERAS_BACKEND": "torch"}),
        pytest.param("keras", {"KERAS_BACKEND": "tensorflow"}, marks=pytest.mark.thorough),
        ("tensorflow", {}),
        pytest.param("tf.keras", {"TF_USE_LEGACY_KERAS": "1"}, marks=pytest.mark.thorough),
        pytest.param("tf.keras", {"KERAS_BACKEND": "tensorflow"}, marks=pytest.mark.thorough),
    ],
    ids=["keras-torch", "keras-tensorflow", "tensorflow", "tf_keras", "tf.keras"],
)
def test_a_killed_rank_is_replaced_and_all_ranks_hold_the_same_bits(kind, environment):
    words = ["-np", "2", "--min-np", "1", sys.executable, PROGRAM, kind, "10", "2", "5"]
    environment = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "-1", "OMP_NUM_THREADS": "1", **environment}
    result = call_bare(*words, seconds=180, **environment)
    assert result.status == 0, result.stdout + result.stderr
    assert "rank 1 on localhost was killed by signal SIGKILL (9); the job goes on with 1 rank" in result.stderr
    facts = [json.loads(line.partition(": ")[2]) for line in result.stdout.splitlines() if "digest" in line]
    assert sorted((fact["rank"], fact["size"]) for fact in facts) == [(0, 2), (1, 2)]
    assert facts[0]["digest"] == facts[1]["digest"]
    assert [fact["finite"] for fact in facts] == [True, True]


@pytest.mark.parametrize(
    ("arguments", "environment"),
    [
        (["hvdkit.keras"], {"KERAS_BACKEND": "torch"}),
        (["hvdkit.tensorflow.keras"], {"KERAS_BACKEND": "tensorflow"}),
        (["hvdkit.tensorflow.keras", "legacy"], {"TF_USE_LEGACY_KERAS": "1"}),
        (["hvdkit.keras", "passes"], {"KERAS_BACKEND": "torch"}),
        pytest.param(["hvdkit.keras", "passes"], {"KERAS_BACKEND": "tensorflow"}, marks=pytest.mark.thorough),
        pytest.param(["hvdkit.keras"], {"KERAS_BACKEND": "tensorflow"}, marks=pytest.mark.thorough),
        pytest.param(["hvdkit.tensorflow.keras"], {"TF_USE_LEGACY_KERAS": "1"}, marks=pytest.mark.thorough),
    ],
    ids=["keras-torch", "tf.keras", "tf_keras-legacy", "torch-passes", "tf-passes", "keras-tensorflow", "tf_keras"],
)
def test_a_state_goes_back_to_its_last_save_more_than_once(arguments, environment):
    environment = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "-1", **environment}
    result = run_to_end([sys.executable, RESTORE_PROGRAM, *arguments], **environment)
    assert result.status == 0, result.stderr


ADAPTERS = pytest.mark.parametrize(
    ("arguments", "environment"),
    [
        (["hvdkit.keras"], {"KERAS_BACKEND": "torch"}),
        pytest.param(["hvdkit.keras"], {"KERAS_BACKEND": "tensorflow"}, marks=pytest.mark.thorough),
        (["hvdkit.tensorflow.keras"], {"TF_USE_LEGACY_KERAS": "1"}),
        pytest.param(["hvdkit.tensorflow.keras", "legacy"], {"TF_USE_LEGACY_KERAS": "1"}, marks=pytest.mark.thorough),
        pytest.param(["hvdkit.tensorflow.keras"], {"KERAS_BACKEND": "tensorflow"}, marks=pytest.mark.thorough),
    ],
    ids=["keras-torch", "keras-tensorflow", "tf_keras", "tf_keras-legacy", "tf.keras"],
)


@ADAPTERS
def test_fit_continues_in_the_middle_of_an_epoch_as_if_nothing_had_happened(arguments, environment):
    environment = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "-1", **environment}
    result = run_to_end([sys.executable, FIT_PROGRAM, *arguments], seconds=200, **environment)
    assert result.status == 0, result.stderr
    assert result.stdout.count("PASSED") == 2, result.stdout


@ADAPTERS
def test_all_ranks_continue_fit_at_the_same_batch_while_ranks_come_and_go(arguments, environment):
    environment = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "-1", **environment}
    command = [sys.executable, "-m", "tests.elastic.keras_fit_scenarios", *arguments]
    result = run_to_end(command, seconds=200, **environment)
    assert result.status == 0, result.stderr
