"""The examples and scripts written for Horovod, trained over several hosts, also on slow links."""

from __future__ import annotations

import re

import pytest

from tests.cluster.cluster import Cluster

HOSTS = ["-np", "3", "-H", "w1:1,w2:1,w3:1"]
TWO_HOSTS = ["-np", "2", "-H", "w1:1,w2:1"]
SMALL_MODEL = ["--layers", "1", "--width", "128", "--context", "32", "--batch-size", "2"]
SMALL_TEXT = ["--steps", "4", "--report-every", "2", "--max-bytes", "500000", *SMALL_MODEL]
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2"}


@pytest.mark.parametrize("controller", ["--gloo", pytest.param("--mpi", marks=pytest.mark.thorough)])
def test_digits_in_pytorch(cluster: Cluster, controller):
    command = ["python", "/examples/pytorch_digits.py", "--epochs", "10", "--checkpoint-dir", "/tmp/tmp.digits"]  # noqa: S108 (there)
    result = cluster.run(["hvdkitrun", controller, *HOSTS, *command])
    assert result.status == 0, result.output
    [accuracy] = re.findall(r"test accuracy ([\d.]+)% \(360 images, 3 process", result.output)
    assert float(accuracy) >= 95


@pytest.mark.thorough
def test_digits_in_keras(cluster: Cluster):
    command = ["python", "/examples/keras_digits.py", "--epochs", "10", "--checkpoint-dir", "/tmp/tmp.keras"]  # noqa: S108 (there)
    result = cluster.run(["hvdkitrun", "--mpi", *HOSTS, *command], **QUIET)
    assert result.status == 0, result.output
    [accuracy] = re.findall(r"test accuracy ([\d.]+)% \(360 images, 3 process", result.output)
    assert float(accuracy) >= 95


@pytest.mark.thorough
@pytest.mark.parametrize("script", ["pytorch_text.py", "keras_text.py"])
def test_text_over_slow_links(cluster: Cluster, script):
    sent = {}
    with cluster.limited("200mbit"):
        for compression in ("none", "int8"):
            before = cluster.sent("w2")
            command = ["python", f"/examples/{script}", *SMALL_TEXT, "--compression", compression]
            result = cluster.run(["hvdkitrun", "--gloo", *TWO_HOSTS, *command], **QUIET)
            assert result.status == 0, result.output
            losses = [float(loss) for loss in re.findall(r"step \d: loss ([\d.]+)", result.output)]
            assert len(losses) == 2, result.output
            assert all(4 < loss < 7 for loss in losses)  # ln 256 = 5.5 for a guess
            assert "validation loss" in result.output
            sent[compression] = cluster.sent("w2") - before
    assert sent["int8"] < 0.6 * sent["none"], sent  # a quarter, and what is not gradients


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("controller", "script"),
    [
        ("--gloo", ["pytorch_digits.py"]),
        ("--mpi", ["keras_digits.py", "horovod.tensorflow.keras"]),
        ("--gloo", ["keras_digits.py", "horovod.keras"]),
    ],
)
def test_scripts_written_for_horovod_as_they_are(cluster: Cluster, controller, script):
    command = ["python", f"/scripts/{script[0]}", *script[1:]]
    result = cluster.run(["hvdkitrun", controller, *TWO_HOSTS, "--as-horovod", *command], **QUIET)
    assert result.status == 0, result.output
    [last] = [line for line in result.output.splitlines() if "done: " in line]
    assert "done: 2 workers, loss " in last
    assert last.endswith("same weights: True")
