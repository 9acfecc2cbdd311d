"""The examples and scripts written for Horovod, trained over several hosts, also on slow links."""

from __future__ import annotations

import re

import pytest

from tests.cluster.cluster import Cluster

HOSTS = ["-np", "3", "-H", "w1:1,w2:1,w3:1"]


@pytest.mark.parametrize("controller", ["--gloo", pytest.param("--mpi", marks=pytest.mark.thorough)])
def test_digits_in_pytorch(cluster: Cluster, controller):
    command = ["python", "/examples/pytorch_digits.py", "--epochs", "10", "--checkpoint-dir", "/tmp/tmp.digits"]  # noqa: S108 (there)
    result = cluster.run(["hvdkitrun", controller, *HOSTS, *command])
    assert result.status == 0, result.output
    [accuracy] = re.findall(r"test accuracy ([\d.]+)% \(360 images, 3 process", result.output)
    assert float(accuracy) >= 95
