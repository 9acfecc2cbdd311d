"""Where rank 0 listens, and where the others look for it: one address, decided alike on all ranks of a host."""

from __future__ import annotations

import socket

import pytest

from hvdkit.environments.base import Rendezvous, World
from hvdkit.errors import TransportUnavailableError
from hvdkit.transports.security import listening
from tests.told import told

OWN = ("10.0.0.1", "127.0.0.1", "127.0.1.1", "fd00::1")


def world(host: str = "name", local_size: int | None = 1) -> World:
    return World("by hand", 0, 2, 0, local_size, rendezvous=Rendezvous("tcp", host, 1))


@pytest.fixture(autouse=True)
def addresses(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """What names stand for; this host is 10.0.0.1."""
    known: dict[str, list[str]] = {}
    monkeypatch.setattr(listening, "addresses_of", lambda host: known.get(host, [host]))
    monkeypatch.setattr(listening, "is_own", OWN.__contains__)
    monkeypatch.setattr(listening, "own_address", lambda towards: "10.0.0.1")
    monkeypatch.setattr(listening, "named_interfaces", list)
    return known


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_ranks_that_meet_on_a_loopback_are_on_one_host(host):
    assert listening.on_one_host(world(host, local_size=None))
    assert listening.addresses_for(world(host)) == ["127.0.0.1"]


@pytest.mark.parametrize(("local_size", "expected"), [(2, True), (1, False), (None, False)])
def test_ranks_are_on_one_host_if_the_launcher_says_so(local_size, expected):
    assert listening.on_one_host(world(local_size=local_size)) == expected


def test_a_part_of_the_ranks_is_on_one_host_if_all_are():
    part = World("hvdkitrun", 2, 4, 2, 4).part([0, 2])
    assert listening.on_one_host(part)
    assert (part.rank, part.size, part.local_rank, part.launched) == (1, 2, 1, (0, 2))
    # One of two hosts' ranks each, of which the launcher does not say where the others are.
    part = World("hvdkitrun", 2, 4, 0, 2).part([0, 2])
    assert not listening.on_one_host(part)
    assert part.local_size is None


# what the name stands for, how many ranks are on the host: where they look for rank 0, and where it listens
@pytest.mark.parametrize(
    ("stands_for", "local_size", "address"),
    [
        (["10.0.0.1"], 1, ("name", "10.0.0.1")),
        (["127.0.1.1", "10.0.0.1"], 1, ("name", "10.0.0.1")),
        (["127.0.1.1"], 2, ("name", "127.0.1.1")),  # all ranks find it there
        (["127.0.1.1"], 1, ("10.0.0.1", "10.0.0.1")),  # other hosts see another address behind the name
        (["127.0.1.1"], None, ("10.0.0.1", "10.0.0.1")),
        (["203.0.113.9"], 1, ("name", "10.0.0.1")),  # another host's, or translated on the way here
        (["fd00::1"], 1, ("name", "fd00::1")),
    ],
)
def test_where_ranks_meet_by_a_name(addresses, stands_for, local_size, address):
    addresses["name"] = stands_for
    assert listening.meeting_addresses(world(local_size=local_size), "name") == address


def test_a_name_that_nobody_knows_is_told_with_what_to_do(monkeypatch):
    def unknown(host: str) -> list[str]:
        raise socket.gaierror("unknown")

    monkeypatch.setattr(listening, "addresses_of", unknown)
    fact = "rank 0 does not know the host 'name' where the ranks should meet: unknown\n"
    hint = "HINT: MASTER_ADDR, or the first host of the job, must be a name or an address that all hosts know."
    with told(TransportUnavailableError, fact + hint):
        listening.meeting_addresses(world(), "name")


def test_named_interfaces_come_before_everything(monkeypatch):
    monkeypatch.setattr(listening, "named_interfaces", lambda: ["lo"])
    assert listening.addresses_for(world(local_size=1)) == ["127.0.0.1"]
    monkeypatch.setattr(listening, "named_interfaces", lambda: ["no-such"])
    hint = "HINT: GLOO_SOCKET_IFNAME or --network-interfaces names the interface; correct it, or leave it out."
    with told(TransportUnavailableError, "rank 0: ", "'no-such'", f"\n{hint}"):
        listening.addresses_for(world("127.0.0.1"))


def test_a_port_that_is_taken_is_told_with_what_to_do():
    with listening.listen("127.0.0.1") as first:
        assert first.getsockname()[0] == "127.0.0.1"
        port = first.getsockname()[1]
        with told(
            TransportUnavailableError,
            f"this rank cannot listen on 127.0.0.1 port {port}: Address already in use\n"
            "HINT: another program, or another job, has the port; choose another MASTER_PORT, or let hvdkitrun choose.",
        ):
            listening.listen("127.0.0.1", port)


def test_an_address_of_another_host_is_told_with_what_to_do():
    with told(
        TransportUnavailableError,
        "this rank cannot listen on 192.0.2.1 port 0: Cannot assign requested address\n"
        "HINT: choose a MASTER_PORT from 1024 to 65535. If this host does not have the address, name its network "
        "interface with GLOO_SOCKET_IFNAME or --network-interfaces.",
    ):
        listening.listen("192.0.2.1")
