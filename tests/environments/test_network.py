"""Which address of this host a job uses, and the secret of its ranks."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from hvdkit.environments import network
from hvdkit.environments.network import LONGEST_SECRET, job_secret
from hvdkit.errors import EnvironmentConflictError
from tests.told import told


def stands_for(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    """All names stand for these addresses."""
    entries = [(socket.AF_INET6 if ":" in one else socket.AF_INET, 1, 6, "", (one, 0)) for one in addresses]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *arguments, **options: entries)


def test_named_interfaces_are_those_of_gloo_else_horovods():
    assert network.named_interfaces({}) == []
    assert network.named_interfaces({"GLOO_SOCKET_IFNAME": "a,b", "HOROVOD_GLOO_IFACE": "c"}) == ["a", "b"]
    assert network.named_interfaces({"GLOO_SOCKET_IFNAME": "", "HOROVOD_GLOO_IFACE": "c"}) == ["c"]


def test_an_interface_that_is_not_there_is_told_with_those_that_are():
    with pytest.raises(LookupError, match=r"'no-such'.*lo"):
        network.interface_address("no-such")


LOOPBACKS = ["localhost", "127.0.0.1", "127.0.1.1", "::1", "0.0.0.0", "::"]  # noqa: S104


@pytest.mark.parametrize("host", [*LOOPBACKS, "192.0.2.1", "fe80::1%eth0", "localhost.example", "node1", ""])
def test_a_loopback_is_told_from_what_others_may_reach(host):
    assert network.is_loopback(host) == (host in LOOPBACKS)


def test_ipv4_comes_before_ipv6(monkeypatch):
    stands_for(monkeypatch, "::1", "127.0.0.1", "127.0.0.1")
    assert network.addresses_of("x") == ["127.0.0.1", "::1"]


def test_nobody_listens_everywhere_where_everywhere_is_named():
    assert network.addresses_of("0.0.0.0") == ["127.0.0.1"]  # noqa: S104
    assert network.addresses_of("::") == ["::1"]


def test_a_host_whose_name_leads_nowhere_is_found_by_the_way_to_others(monkeypatch):
    monkeypatch.setattr(network, "addresses_of", lambda host: ["127.0.1.1", "198.51.100.7"])
    monkeypatch.setattr(network, "address_towards", {"other": "10.0.0.1"}.__getitem__)
    monkeypatch.setattr(network, "is_own", lambda address: address == "10.0.0.1")
    assert network.own_address("other") == "10.0.0.1"


def test_a_host_without_a_network_has_its_loopback(monkeypatch):
    def nowhere(*arguments: object) -> list[str]:
        raise OSError("no route")

    monkeypatch.setattr(network, "addresses_of", nowhere)
    monkeypatch.setattr(network, "address_towards", nowhere)
    assert network.own_address("other") == network.LOOPBACK


# -- the file with the job's secret: taken only if nobody else can have read or written it -----------------------------

SECRET = "0123456789abcdef" * 2


def secret_of(path: Path) -> bytes | None:
    return job_secret({"HVDKIT_SECRET_FILE": str(path)})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "secret"
    file.write_text(f"{SECRET}\n")
    file.chmod(0o600)
    return file


def test_a_job_needs_no_secret():
    assert job_secret({}) is job_secret({"HVDKIT_SECRET_FILE": ""}) is None


def test_the_secret_is_what_is_in_the_file_without_the_end_of_the_line(path):
    assert secret_of(path) == SECRET.encode()
    path.chmod(0o400)
    assert secret_of(path) == SECRET.encode()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666])
def test_a_file_that_others_can_read_or_change_is_refused(path, mode):
    path.chmod(mode)
    fact = f"the job's secret HVDKIT_SECRET_FILE={path} can be read or changed by others"
    with told(EnvironmentConflictError, f"{fact}\nHINT: make it yours alone: chown, and chmod 600"):
        secret_of(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_file_of_another_user_is_refused(path):
    os.chown(path, 12345, -1)
    with pytest.raises(EnvironmentConflictError, match="by others"):
        secret_of(path)


@pytest.mark.parametrize("text", ["", " " * 40, "short", "x" * (LONGEST_SECRET + 1)])
def test_a_file_with_too_little_or_too_much_is_refused(path, text):
    path.write_text(text)
    with pytest.raises(EnvironmentConflictError, match=r"from 16 to 4096 bytes\nHINT: make one") as caught:
        secret_of(path)
    assert "xxx" not in str(caught.value)


def test_a_file_that_is_not_there_and_what_is_no_file_are_refused(tmp_path):
    with pytest.raises(EnvironmentConflictError, match="cannot be read: No such file"):
        secret_of(tmp_path / "none")
    with pytest.raises(EnvironmentConflictError, match="is not a file"):
        secret_of(tmp_path)
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(EnvironmentConflictError, match="is not a file"):
        secret_of(tmp_path / "pipe")
