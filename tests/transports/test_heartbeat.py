"""Signs of life from below Python: who sees whose, who is let in, and that a fork gives none for its parent."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdkit.environments.base import World
from hvdkit.transports.node import heartbeat
from hvdkit.transports.node.heartbeat import watching_pairs
from tests.launch.launching import run_to_end
from tests.transports.shared import LINE, native, needs_memory_files, needs_native, new_window, open_descriptors
from tests.waiting import until

PAUSE = 0.005
SECONDS = 20.0


def moves(beating: Any, rank: int) -> None:
    """Fails unless signs of a rank go on to be counted."""
    before = beating.count(rank)
    until(lambda: beating.count(rank) > before + 1)


# -- who watches whom -------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.randoms())
def test_each_rank_is_watched_from_each_other_node(sizes, shuffler):
    ranks = list(range(sum(sizes)))
    shuffler.shuffle(ranks)
    nodes = []
    for size in sizes:
        nodes.append(sorted(ranks[:size]))
        ranks = ranks[size:]
    pairs = watching_pairs(nodes)
    assert all(low < high for low, high in pairs)
    for node in nodes:
        for rank in node:
            connected = {low + high - rank for low, high in pairs if rank in (low, high)}
            assert not connected & set(node)
            assert all(connected & set(other) for other in nodes if other is not node)


# -- beating ----------------------------------------------------------------------------------------------------------


@needs_native
def test_a_rank_alone_counts_its_own_signs_until_it_is_stopped():
    beating = native.Heartbeat(None, 0, 3, 1, [], PAUSE)
    moves(beating, 1)
    assert (beating.count(0), beating.count(2)) == (0, 0)
    beating.stop()
    stopped = beating.count(1)
    time.sleep(10 * PAUSE)
    assert beating.count(1) == stopped
    beating.stop()
    with pytest.raises(IndexError, match="count: no such rank"):
        beating.count(3)
    with pytest.raises(IndexError, match="Heartbeat: "):
        native.Heartbeat(None, 0, 2, 2, [], 1.0)
    with pytest.raises(ValueError, match="Heartbeat: "):
        native.Heartbeat(None, 0, 2, 0, [], float("nan"))


@needs_native
@needs_memory_files
def test_ranks_of_a_node_see_each_other_and_what_one_of_them_hears_from_another_node():
    window = new_window(5 * LINE)
    near, far = socket.socketpair()
    before = open_descriptors()
    first = native.Heartbeat(window, LINE, 3, 0, [], PAUSE)
    second = native.Heartbeat(window, LINE, 3, 1, [(near.detach(), 2)], PAUSE)
    other = native.Heartbeat(None, 0, 3, 2, [(far.detach(), 1)], PAUSE)
    for rank in range(3):
        moves(first, rank)
        moves(second, rank)
    moves(other, 1)
    assert other.count(0) == 0
    second.stop()
    for beating, rank in ((first, 1), (first, 2), (other, 1)):
        until(lambda beating=beating, rank=rank: stands_still(beating, rank))
    moves(first, 0)
    moves(other, 2)
    first.stop()
    other.stop()
    assert len(open_descriptors()) == len(before) - 2


def stands_still(beating: Any, rank: int) -> bool:
    count = beating.count(rank)
    time.sleep(4 * PAUSE)
    return bool(beating.count(rank) == count)


FORKING = """
import os, socket, sys, time
from hvdkit.kernels._native import Heartbeat
from tests.transports.shared import LINE, new_window
window = new_window(2 * LINE)
near, far = socket.socketpair()
for _ in range(20):
    beating = Heartbeat(window, 0, 2, 0, [(near.dup().detach(), 1)], 0.0005)
    time.sleep(0.002)
    child = os.fork()
    if child == 0:
        counted = beating.count(0)
        if sys.argv[1] == "stops":
            beating.stop()
            beating.stop()
        elif sys.argv[1] == "drops":
            del beating
        sys.exit()  # whatever is left goes with the interpreter
    moved = beating.count(0)
    _, status = os.waitpid(child, 0)
    assert status == 0, status
    while beating.count(0) == moved:
        time.sleep(0.0005)
    child = os.fork()
    if child == 0:
        time.sleep(60)
    beating.stop()
    stopped = beating.count(0)
    time.sleep(0.005)
    assert beating.count(0) == stopped, "a child beats"
    os.kill(child, 9)
    os.waitpid(child, 0)
print("ended well")
"""


@needs_native
@needs_memory_files
@pytest.mark.parametrize("then", ["stops", "drops", "exits"])
def test_a_fork_does_not_beat_for_its_parent_and_can_end(then):
    done = run_to_end([sys.executable, "-c", FORKING, then])
    assert (done.status, done.stdout) == (0, "ended well\n"), done.stderr


# -- connecting -------------------------------------------------------------------------------------------------------


def transport_of(rank: int, *lost: int) -> Any:
    """As much of a transport as knows its rank, and the ranks that are lost."""
    return SimpleNamespace(rank=rank, lost_peers=lambda: dict.fromkeys(lost, "it is gone"))


class Job:
    """Ranks that are threads, with nothing between them but what they tell each other."""

    def __init__(self, size: int, change: Callable[[int, dict[str, Any]], dict[str, Any]] = lambda _, one: one) -> None:
        self.size = size
        self.reports: list[bytes] = [b""] * size
        self._change = change
        self._all_reported = threading.Barrier(size, timeout=SECONDS)

    @contextmanager
    def connected(self, seconds: float = SECONDS) -> Iterator[list[dict[int, socket.socket]]]:
        """The connections of each rank, if each is a node of its own."""
        with ThreadPoolExecutor(self.size) as pool, ExitStack() as stack:
            connections = list(pool.map(lambda rank: self._connect_one(rank, seconds), range(self.size)))
            for connection in (one for by_peer in connections for one in by_peer.values()):
                stack.enter_context(connection)
            yield connections

    def _connect_one(self, rank: int, seconds: float) -> dict[int, socket.socket]:
        def exchange(blob: bytes) -> list[bytes]:
            self.reports[rank] = json.dumps(self._change(rank, json.loads(blob))).encode()
            self._all_reported.wait()
            return self.reports

        world = World("by hand", rank, self.size, rank, self.size)
        pairs = watching_pairs([[one] for one in range(self.size)])
        return heartbeat.connect(world, transport_of(rank), pairs, True, exchange, seconds)


def test_ranks_of_different_nodes_are_connected_and_listen_no_more():
    job = Job(4)
    with job.connected() as connections:
        for rank, mine in enumerate(connections):
            assert sorted(mine) == [other for other in range(4) if other != rank]
            for peer, connection in mine.items():
                connection.sendall(f"{rank} to {peer}".encode())
        for rank, mine in enumerate(connections):
            assert {peer: connection.recv(100).decode() for peer, connection in mine.items()} == {
                peer: f"{peer} to {rank}" for peer in mine
            }
        for report in job.reports[:-1]:
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(tuple(json.loads(report)["place"]), SECONDS)


def test_who_does_not_know_the_secret_is_not_let_in_and_the_ranks_are():
    strangers: list[socket.socket] = []

    def come_first(rank: int, report: dict[str, Any]) -> dict[str, Any]:
        if rank == 0:
            for words in (b"", b"\0" * 36, (1).to_bytes(4, "big") + b"\1" * 32):
                strangers.append(socket.create_connection(tuple(report["place"]), SECONDS))
                strangers[-1].sendall(words)
        return report

    with Job(2, come_first).connected() as connections:
        connections[0][1].sendall(b"a rank")
        assert connections[1][0].recv(100) == b"a rank"
        for stranger in strangers:
            stranger.settimeout(SECONDS)
            with stranger, suppress(ConnectionResetError):  # it was not read to its end
                assert stranger.recv(100) == b""


def test_who_cannot_be_reached_is_said_and_nobody_fails(caplog):
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen

        def elsewhere(rank: int, report: dict[str, Any]) -> dict[str, Any]:
            return {**report, "place": nobody.getsockname()} if rank == 0 else report

        with Job(3, elsewhere).connected(1.0) as connections:
            assert [sorted(mine) for mine in connections] == [[], [2], [1]]
    (said,) = [record.getMessage() for record in caplog.records]
    assert said == (
        "rank 0 and ranks [1, 2] cannot exchange signs of life while Python is blocked: they could not be connected; "
        "check whether a firewall closes ports. If a library keeps Python's lock (GIL) on one of these ranks for "
        "longer than HVDKIT_TIMEOUT_SECONDS, the job ends."
    )


def test_nobody_waits_for_a_rank_that_is_lost(caplog):
    def exchange(blob: bytes) -> list[bytes]:
        return [blob, b'{"beats": true}', b'{"beats": true}']

    world, for_ever = World("by hand", 0, 3, 0, 3), 1e6
    assert heartbeat.connect(world, transport_of(0, 1, 2), [(0, 1), (0, 2)], True, exchange, for_ever) == {}
    assert caplog.text == ""


def test_the_listener_is_gone_where_ranks_cannot_tell_each_other():
    before = len(os.listdir("/proc/self/fd"))

    def fail(blob: bytes) -> list[bytes]:
        raise ConnectionError("a rank is lost")

    world = World("by hand", 0, 2, 0, 2)
    with pytest.raises(ConnectionError, match="a rank is lost"):
        heartbeat.connect(world, transport_of(0), [(0, 1)], True, fail, 1.0)
    assert len(os.listdir("/proc/self/fd")) == before
