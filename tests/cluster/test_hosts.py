"""Hosts that cannot be meant or reached, or have something else installed: the launcher or the ranks say which."""

from __future__ import annotations

import pytest

import hvdkit
from tests.cluster.cluster import Cluster
from tests.cluster.test_launchers import INTRODUCE

START_SECONDS = 10  # for what comes before and after the look at the hosts
VERSION_FILE = "/opt/hvdkit/lib/python3.11/site-packages/hvdkit/__init__.py"


@pytest.mark.thorough
def test_a_host_without_a_name_is_named(cluster: Cluster):
    result = cluster.run(["hvdkitrun", "--gloo", "-np", "2", "-H", "w1:1,w9:1", "--start-timeout", "8", *INTRODUCE])
    assert result.status == 1
    assert "cannot reach host w9 by ssh: " in result.output, result.output


def test_a_host_that_does_not_answer_is_named_within_the_start_timeout(cluster: Cluster):
    with cluster.cut("w3"):
        flags = ["-np", "3", "-H", "w1:1,w2:1,w3:1", "--start-timeout", "4"]
        for controller in ("--gloo", "--mpi"):
            result = cluster.run(["hvdkitrun", controller, *flags, *INTRODUCE], seconds=4 + START_SECONDS)
            assert result.status == 1, result.output  # and not timeout's
            assert "cannot reach host w3 by ssh: " in result.output, result.output
            assert "w2" not in result.output


def test_an_interface_that_is_not_there_is_named(cluster: Cluster):
    flags = ["--gloo", "-np", "2", "-H", "launcher:1,w1:1", "--network-interfaces", "eth7"]
    result = cluster.run(["hvdkitrun", *flags, *INTRODUCE])
    assert result.status == 2
    assert "eth7" in result.output, result.output
    assert "eth0" in result.output


def test_a_host_with_another_version_is_an_error_that_says_both(cluster: Cluster):
    cluster.shell(f"sed -i.kept 's/^__version__ = .*/__version__ = \"0.0.1\"/' {VERSION_FILE}", "w2", "root")
    try:
        for controller in ("--gloo", "--mpi"):
            result = cluster.run(["hvdkitrun", controller, "-np", "2", "-H", "w1:1,w2:1", *INTRODUCE])
            assert result.status != 0
            assert "different versions" in result.output, result.output
            assert "0.0.1" in result.output
            assert hvdkit.__version__ in result.output
    finally:
        cluster.shell(f"mv {VERSION_FILE}.kept {VERSION_FILE}", "w2", "root")


def test_a_key_is_made_anew_in_each_cluster_and_none_is_in_the_image(cluster: Cluster):
    there = cluster.shell("stat -c '%a %U' /cluster/ssh/id_ed25519", "w1").split()
    assert there == ["600", "worker"]
    keys = "find / -xdev -name 'id_*25519*' -o -xdev -name 'id_*sa' -o -xdev -name 'ssh_host_*' 2>/dev/null || true"
    assert cluster.shell(keys, "w1").split() == []


@pytest.mark.thorough
def test_the_doctor_finds_what_the_image_has(cluster: Cluster):
    result = cluster.run(["hvdkit", "doctor"], host="w1")
    lines = {line[5:].partition(":")[0]: line for line in result.output.splitlines() if line.startswith("[")}
    for name in ("PyTorch", "TensorFlow", "Keras", "MPI", "Gloo", "kernels"):
        assert lines[name].startswith("[ok]"), result.output
