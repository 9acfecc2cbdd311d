"""What Horovod's engine finds in the environment while it starts, and what is there afterwards."""

from __future__ import annotations

import os

from hvdkit.environments.libraries import for_a_while, horovod_variables


def test_gloos_ranks_are_told_their_place_and_where_they_meet(monkeypatch):
    monkeypatch.delenv("HOROVOD_GLOO_IFACE", raising=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth1,eth0")
    variables = horovod_variables("gloo", 1, 3, ("10.0.0.1", 4711), 59.2)
    assert (variables["HOROVOD_RANK"], variables["HOROVOD_SIZE"]) == ("1", "3")
    assert (variables["HOROVOD_GLOO_RENDEZVOUS_ADDR"], variables["HOROVOD_GLOO_RENDEZVOUS_PORT"]) == (
        "10.0.0.1",
        "4711",
    )
    assert (variables["HOROVOD_GLOO_IFACE"], variables["HOROVOD_GLOO_TIMEOUT_SECONDS"]) == ("eth1", "60")


def test_gloo_listens_where_the_job_does_if_no_interface_is_named(monkeypatch):
    monkeypatch.delenv("HOROVOD_GLOO_IFACE", raising=False)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert horovod_variables("gloo", 0, 2, ("127.0.0.1", 1), 60.0, "lo")["HOROVOD_GLOO_IFACE"] == "lo"
    assert horovod_variables("gloo", 0, 2, ("10.0.0.1", 1), 60.0)["HOROVOD_GLOO_IFACE"] is None
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth1")
    assert horovod_variables("gloo", 0, 2, ("127.0.0.1", 1), 60.0, "lo")["HOROVOD_GLOO_IFACE"] == "eth1"


def test_under_mpi_the_place_is_mpis(monkeypatch):
    monkeypatch.setenv("HOROVOD_CPU_OPERATIONS", "ccl")
    variables = horovod_variables("mpi", 1, 3, None, 60.0)
    assert "HOROVOD_RANK" not in variables
    assert (variables["HOROVOD_CONTROLLER"], variables["HOROVOD_CPU_OPERATIONS"]) == ("mpi", "ccl")


def test_the_environment_is_the_scripts_again_when_the_engine_has_started(monkeypatch):
    monkeypatch.setenv("HOROVOD_TIMELINE", "trace.json")
    monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", "1000")
    monkeypatch.delenv("HOROVOD_RANK", raising=False)
    before = dict(os.environ)
    with for_a_while(horovod_variables("gloo", 0, 2, ("127.0.0.1", 1), 60.0)):
        assert "HOROVOD_TIMELINE" not in os.environ
        assert (os.environ["HOROVOD_FUSION_THRESHOLD"], os.environ["HOROVOD_RANK"]) == ("0", "0")
    assert dict(os.environ) == before
