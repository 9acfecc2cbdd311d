"""The store where ranks meet: nobody else is heard or kept, and its port is closed while all ranks are connected."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
from collections.abc import Iterator

import pytest

from hvdkit.errors import AuthenticationError
from hvdkit.transports.security import store as store_module
from hvdkit.transports.security.credentials import PROOF_BYTES, Credentials, initiate
from hvdkit.transports.security.listening import listen
from hvdkit.transports.security.store import STORE, RendezvousStore, StoreServer, connect
from tests.told import told
from tests.waiting import until

SECONDS = 20.0
SESSION = Credentials(b"a secret of this job", "job", 0)
OTHERS = [1, 2]


class Place:
    """A server that expects two ranks, and a copy of its socket such as a shell around rank 0 has."""

    def __init__(self) -> None:
        listener = listen("127.0.0.1")
        self.copy = os.dup(listener.fileno())
        self.address: tuple[str, int] = listener.getsockname()[:2]
        self.server = StoreServer(SESSION, self.address)
        self.server.expect(OTHERS, listener)

    def connect(self, rank: int) -> RendezvousStore:
        return connect(SESSION, rank, self.address, SECONDS)

    def is_closed(self) -> bool:
        with contextlib.suppress(ConnectionRefusedError), socket.create_connection(self.address, timeout=SECONDS):
            return False
        return True


@pytest.fixture
def place() -> Iterator[Place]:
    made = Place()
    yield made
    os.close(made.copy)


def test_all_ranks_read_what_one_has_set_and_the_port_is_closed_though_others_have_inherited_it(place):
    ranks = [RendezvousStore(place.server, SECONDS), *(place.connect(rank) for rank in OTHERS)]
    for number, rank in enumerate(ranks):
        rank.set(f"key {number}", f"value {number}")
    assert [rank.multi_get(["key 0", "key 1", "key 2"]) for rank in ranks] == [[b"value 0", b"value 1", b"value 2"]] * 3
    until(place.is_closed)


def test_the_port_stays_open_for_a_rank_that_is_started_anew(place):
    dead = place.connect(1)
    dead._server.close()
    until(lambda: place.server.lacks([1]))
    second = place.connect(2)
    first = place.connect(1)
    first.set("key", "value")
    assert second.get("key") == b"value"
    until(place.is_closed)


def flood(place: Place, begin: bytes, most: int) -> int:
    """The bytes that are taken of somebody who goes on sending."""
    sent = 0
    with contextlib.suppress(OSError), socket.create_connection(place.address, timeout=2) as connection:
        connection.sendall(begin)
        while sent < most:
            sent += connection.send(bytes(1 << 16))
    return sent


@pytest.mark.parametrize("begin", [b"", (1).to_bytes(4, "little")], ids=["noise", "a rank's number"])
def test_what_a_stranger_sends_is_not_kept(place, begin):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    taken = [flood(place, begin, 64 << 20) for _ in range(20)]
    assert max(taken) < 16 << 20  # what the system buffers of a connection
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB; 1280 MiB were to be sent
    for rank in OTHERS:
        place.connect(rank).set("key", "value")


def test_a_stranger_who_cannot_prove_the_secret_stores_nothing(place):
    request = store_module._REQUEST.pack(store_module.SET, 0, 0)
    with socket.create_connection(place.address, timeout=SECONDS) as connection:
        next(initiate(Credentials(b"a guess", "job", 0), 1, STORE, connection.sendall))
        assert len(connection.recv(4096)) > 0
        connection.sendall(bytes(PROOF_BYTES) + request)
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(4096) == b""
    until(lambda: place.server.refused == {1})
    assert place.server.lacks([1])
    with told(AuthenticationError, "a peer claiming to be rank 0 does not know the job's secret."):
        connect(Credentials(b"a guess", "job", 0), 1, place.address, SECONDS)


def test_connections_that_say_nothing_keep_no_rank_out(place, monkeypatch):
    monkeypatch.setattr(store_module, "MOST_UNPROVED", 8)
    with contextlib.ExitStack() as stack:
        for _ in range(40):
            stack.enter_context(socket.create_connection(place.address, timeout=SECONDS))
        for rank in OTHERS:
            place.connect(rank).set("key", "value")
