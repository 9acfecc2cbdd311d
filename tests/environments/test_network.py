"""Which address of this host a job uses."""

from __future__ import annotations

import socket

import pytest

from hvdkit.environments import network


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


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.0.1.1", "::1", "0.0.0.0", "::"])  # noqa: S104
def test_a_loopback_is_known(host):
    assert network.is_loopback(host)


@pytest.mark.parametrize("host", ["192.0.2.1", "fe80::1%eth0", "localhost.example", "node1", ""])
def test_what_others_may_reach_is_no_loopback(host):
    assert not network.is_loopback(host)


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
