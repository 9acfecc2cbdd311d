"""The tests of Horovod's engine that need no other hosts: few machines have built Horovod, and the image has."""

from __future__ import annotations

import re

import pytest

from tests.cluster.cluster import Cluster

pytestmark = pytest.mark.thorough
# On the image's Python, as its user: tests/ is mounted there. What takes minutes is left to who has built Horovod.
PYTEST = ["python", "-m", "pytest", "-q", "--all", "-p", "no:cacheprovider", "--basetemp", "/work/pytest", "-k"]
OWN = "test_horovods_engine and torch"


def test_horovods_engine_on_one_host(cluster: Cluster):
    command = ["env", "--chdir", "/checkout", *PYTEST, OWN, "tests/plugins/test_horovod.py"]
    result = cluster.run(command, host="w1", seconds=300, PYTHONDONTWRITEBYTECODE="1")
    cluster.shell("rm -rf /work/pytest", "w1")
    assert result.status == 0, result.output
    [passed] = re.findall(r"(\d+) passed", result.output)
    assert int(passed) >= 20, result.output
    assert "skipped" not in result.output, result.output
