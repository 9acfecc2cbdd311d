"""Connections for control messages: what comes in is whole and in order, strangers are not heard, an end is told."""

from __future__ import annotations

import gc
import os
import re
import resource
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest

from hvdkit.transports import control
from hvdkit.transports.control import ControlConnections
from hvdkit.transports.link import MESSAGE, PAIR
from hvdkit.transports.security.credentials import NONCE_BYTES, TAG_BYTES, Credentials
from tests.faults.outsider import NONSENSE
from tests.transports.shared import connected
from tests.waiting import until

SECONDS = 30.0
SESSION = Credentials(b"a secret", "job", 1)
RANKS = 3


class Rank:
    def __init__(self, rank: int, listeners: list[socket.socket], session: Credentials) -> None:
        self.heard: list[tuple[int, int, bytes]] = []
        self.lost: dict[int, str] = {}
        places = [one.getsockname() for one in listeners]
        self.place = places[rank]
        self.connections = ControlConnections(
            rank, listeners[rank], places, session, lambda *one: self.heard.append(one), self.lost.__setitem__
        )

    def send(self, peer: int, payload: bytes, kind: int = MESSAGE) -> None:
        self.connections.send(peer, kind, payload)


def listening() -> list[socket.socket]:
    return [socket.create_server(("127.0.0.1", 0)) for _ in range(RANKS)]


@pytest.fixture
def ranks() -> Iterator[list[Rank]]:
    listeners = listening()
    made = [Rank(rank, listeners, SESSION) for rank in range(RANKS)]
    yield made
    for one in made:
        one.connections.close()


def test_what_is_said_arrives_whole_and_in_order_both_ways_at_once(ranks):
    sizes = [0, 1, 5, 70_000, 3, 4_000_000, 0, 17]
    for size in sizes:  # both begin, so that both connect
        for me, peer in ((0, 1), (1, 0)):
            ranks[me].send(peer, os.urandom(1) * size, PAIR if size == 5 else MESSAGE)
    for me in (0, 1):
        until(lambda me=me: len(ranks[me].heard) == len(sizes))
        assert [len(payload) for _, _, payload in ranks[me].heard] == sizes
        assert [kind for _, kind, _ in ranks[me].heard] == [PAIR if size == 5 else MESSAGE for size in sizes]
        assert {peer for peer, _, _ in ranks[me].heard} == {1 - me}
    assert not ranks[2].heard
    assert connected(ranks[2].connections) == []
    assert not any(one.lost for one in ranks)


def test_who_ends_is_lost_once_all_that_it_said_has_come_in(ranks):
    ranks[1].send(0, b"x" * 1_000_000)
    ranks[1].send(0, b"goodbye")
    ranks[1].connections.close()
    until(lambda: ranks[0].lost)
    assert [payload[-7:] for _, _, payload in ranks[0].heard] == [b"xxxxxxx", b"goodbye"]
    assert ranks[0].lost == {1: "Connection closed by peer"}
    ranks[0].send(1, b"to nobody")
    assert not ranks[2].lost


def test_that_one_who_was_let_go_ends_is_no_loss(ranks):
    ranks[1].send(0, b"here")
    until(lambda: ranks[0].heard)
    for me, peer in ((0, 1), (1, 0)):
        ranks[me].connections.let_go([peer])
    ranks[1].connections.drop()
    until(lambda: not connected(ranks[0].connections))
    ranks[0].send(1, b"after all")  # which connects anew, and makes an end a loss again
    until(lambda: ranks[1].heard == [(0, MESSAGE, b"after all")])
    assert not ranks[0].lost
    ranks[1].connections.close()
    until(lambda: ranks[0].lost)


def test_a_rank_that_is_not_there_is_lost(ranks):
    ranks[2].connections.close()
    ranks[0].send(2, b"anybody?")
    until(lambda: ranks[0].lost)
    assert ranks[0].lost.keys() == {2}


def test_where_there_are_too_many_files_one_connection_fails_and_the_others_go_on(ranks):
    ranks[1].send(0, b"here")
    until(lambda: ranks[0].heard)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    gc.collect()  # which would make room later
    fillers = [os.dup(0)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (fillers[0] + 8, hard))
    try:
        with suppress(OSError):
            while True:
                fillers.append(os.dup(0))
        ranks[0].send(2, b"anybody?")
        until(lambda: ranks[0].lost)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for filler in fillers:
            os.close(filler)
    assert ranks[0].lost.keys() == {2}
    assert re.fullmatch(r"rank 0 cannot connect to it at .*: Too many open files", ranks[0].lost[2])
    ranks[0].send(1, b"still here")
    until(lambda: ranks[1].heard == [(0, MESSAGE, b"still here")])


def test_a_rank_of_another_session_is_not_heard_and_believes_nobody():
    with ExitStack() as stack:
        listeners = [stack.enter_context(one) for one in listening()]
        ours = Rank(0, listeners, SESSION)
        others = [stack.enter_context(one.dup()) for one in listeners]
        theirs = Rank(1, others, Credentials(b"another secret", "job", 1))
        for rank in (ours, theirs):
            stack.callback(rank.connections.close)
        theirs.send(0, b"let me in")
        ours.send(1, b"who is there?")
        until(lambda: ours.lost and theirs.lost)
        assert "does not know the session's secret" in ours.lost[1]
        assert not ours.heard
        assert not theirs.heard


def test_nonsense_changes_nothing_and_what_was_recorded_is_of_no_use(ranks):
    # Somebody carries what rank 1 says to rank 0, and says it once more.
    with socket.create_connection(ranks[0].place) as recorded:
        hello = bytes([1, 0, 0, 0]) + bytes(NONCE_BYTES)
        recorded.sendall(hello)
        answer = b""
        while len(answer) < NONCE_BYTES + TAG_BYTES:
            answer += recorded.recv(1000)
        nonce = answer[:NONCE_BYTES]
        proof = SESSION.tag("control connects", b"1", b"0", bytes(NONCE_BYTES), nonce)
        frame = (1).to_bytes(4, "little") + b"\0!"
        recorded.sendall(proof + frame)
        until(lambda: ranks[0].heard == [(1, MESSAGE, b"!")])
        for message in (*NONSENSE.values(), hello + proof + frame):
            with suppress(ConnectionError), socket.create_connection(ranks[0].place) as stranger:
                stranger.sendall(message)  # of which not all may be taken
        ranks[1].send(0, b"here")
        until(lambda: (1, MESSAGE, b"here") in ranks[0].heard)
        assert len(ranks[0].heard) == 2
        assert not ranks[0].lost


def test_who_says_nothing_is_not_kept(ranks, monkeypatch):
    monkeypatch.setattr(control, "MOST_STRANGERS", 4)
    strangers = [socket.create_connection(ranks[0].place, timeout=SECONDS) for _ in range(10)]
    ranks[1].send(0, b"here")
    until(lambda: ranks[0].heard)
    assert [stranger.recv(1) for stranger in strangers[:5]] == [b""] * 5  # ended by rank 0
    for stranger in strangers:
        stranger.close()


def test_a_rank_that_is_turned_away_before_it_was_greeted_comes_again():
    """As where too many come at once; what it has to say waits. How long one may be silent is for others to say."""
    listeners = listening()
    ours = Rank(1, [listeners[1], listeners[1], listeners[2]], SESSION)
    ours.connections._places[0] = listeners[0].getsockname()
    try:
        ours.send(0, b"anybody?")
        listeners[0].settimeout(SECONDS)
        for linger in (0, 1):  # ended, and broken off
            connection, _ = listeners[0].accept()
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", linger, 0))
            connection.close()
        connection, _ = listeners[0].accept()
        hello = connection.recv(4 + NONCE_BYTES, socket.MSG_WAITALL)  # and turned away when it was answered
        mine = bytes(NONCE_BYTES)
        connection.sendall(mine + SESSION.tag("control connected to", b"1", b"0", hello[4:], mine))
        assert len(connection.recv(TAG_BYTES, socket.MSG_WAITALL)) == TAG_BYTES
        connection.close()
        theirs = Rank(0, listeners, SESSION)
        until(lambda: theirs.heard == [(1, MESSAGE, b"anybody?")])
        assert not ours.lost
    finally:
        ours.connections.close()
        theirs.connections.close()
        listeners[2].close()


def test_a_message_that_is_too_long_ends_the_connection(ranks, monkeypatch):
    monkeypatch.setattr(control, "LONGEST_MESSAGE", 1000)
    ranks[1].send(0, bytes(1001))
    until(lambda: ranks[0].lost)
    assert ranks[0].lost == {1: "it sent a control message of kind 0 and 1001 bytes"}
    assert not ranks[0].heard


def test_a_forked_child_keeps_no_connection_open(ranks):
    """Else the end of its parent would be noticed by nobody."""
    ranks[1].send(0, b"here")
    until(lambda: ranks[0].heard)
    child = os.fork()
    if child == 0:
        time.sleep(SECONDS)
        os._exit(0)
    try:
        ranks[1].connections.let_go([0])
        ranks[1].connections.drop()  # as the end of a process does it: without a word
        until(lambda: ranks[0].lost)
        ranks[2].send(0, b"still here")  # the parent's were left alone
        until(lambda: len(ranks[0].heard) == 2)
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
