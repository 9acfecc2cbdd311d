"""Ranks that have met and connect: one that is stopped meanwhile is named, by all; a connection that breaks is told."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from hvdkit.engine.session.introduction import InitExchanges
from hvdkit.environments.base import World
from hvdkit.errors import PeerLostError, TransportUnavailableError
from hvdkit.transports import torch_distributed
from hvdkit.transports.gloo_group import open_gloo
from hvdkit.transports.torch_distributed import TorchTransport
from tests.told import told
from tests.transports.shared import connected, in_thread
from tests.waiting import until

SECONDS = 30.0


def on_threads(action: Any, ranks: range) -> list[Future[Any]]:
    return [in_thread(action, rank) for rank in ranks]


@pytest.fixture
def transports(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[TorchTransport]]:
    served: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def open_store(*_: Any) -> tuple[Any, bytes]:  # for each rank, of which one that waits keeps the store to itself
        return dist.TCPStore("127.0.0.1", served.port, is_master=False, wait_for_workers=False), b"a secret"

    monkeypatch.setattr(torch_distributed, "open_store", open_store)
    opened = [
        one.result(SECONDS)
        for one in on_threads(lambda rank: TorchTransport(World("x", rank, 4, rank, 4), 1, 10.0), range(4))
    ]
    yield opened
    for one in on_threads(lambda rank: opened[rank].close(graceful=False), range(4)):
        one.result(SECONDS)


@pytest.fixture
def started(transports: list[TorchTransport]) -> list[TorchTransport]:
    """Return the transports once they know each other's addresses of Gloo."""

    def start(rank: int) -> None:
        exchanges = InitExchanges(SECONDS)
        transports[rank].start(lambda blob: exchanges.exchange(transports[rank], blob), SECONDS, SECONDS)

    for one in on_threads(start, range(4)):
        one.result(SECONDS)
    return transports


def test_a_gloo_that_does_not_open_is_told():
    hint = "HINT: check the addresses of this host, or choose its network interface with GLOO_SOCKET_IFNAME."
    with told(TransportUnavailableError, "rank 2 could not open Gloo: ", f"\n{hint}"):
        open_gloo(2, 2, ["127.0.0.1"])  # there are ranks 0 and 1


def test_a_rank_that_says_nothing_after_they_met_is_named_on_all(transports):
    """Also by those who hear of it only from rank 0."""
    ranks = on_threads(lambda rank: InitExchanges(1.0).exchange(transports[rank], b"here"), range(3))
    for rank in ranks:
        text = "hvd.init() on rank 0 waited 1 s (HVDKIT_TIMEOUT_SECONDS) for ranks [3].\n"
        with told(PeerLostError, f"{text}HINT: see what these ranks printed.") as raised:
            rank.result(SECONDS)
        assert raised.value.rank == 3


def test_a_rank_that_dies_after_they_met_is_named_on_all(transports):
    ranks = on_threads(lambda rank: InitExchanges(SECONDS).exchange(transports[rank], b"here"), range(3))
    transports[3].close(graceful=False)
    for rank in ranks:
        with told(PeerLostError, "hvd.init() on rank 0 waits for rank 3: Connection closed by peer"):
            rank.result(SECONDS)


def test_rank_0_that_says_nothing_is_named(transports):
    for rank in on_threads(lambda rank: InitExchanges(0.5).exchange(transports[rank + 1], b"here"), range(3)):
        with pytest.raises(PeerLostError, match=r"waited 3 s .* for ranks \[0\]"):
            rank.result(SECONDS)


def test_what_engines_say_before_the_last_exchange_is_over_is_kept(transports):
    exchanges = [InitExchanges(SECONDS) for _ in range(4)]
    transports[1].send_control(0, b"[early]")
    done = on_threads(lambda rank: exchanges[rank].exchange(transports[rank], bytes([rank]) * 5000), range(4))
    assert [one.result(SECONDS) for one in done] == [[bytes([rank]) * 5000 for rank in range(4)]] * 4
    assert [exchange.leftover for exchange in exchanges] == [[(1, b"[early]")], [], [], []]


def finished(transport: TorchTransport, *transfers: Any) -> None:
    transport.watch(transfers)
    until(lambda: all(one.done() for one in transfers))


def test_only_those_connect_that_exchange_buffers(started):
    def exchange(rank: int) -> int:
        transport, peer = started[rank], rank ^ 1
        mine, theirs = np.full(1000, rank, np.uint8), np.zeros(1000, np.uint8)
        for tag in range(3):
            finished(transport, transport.isend(mine, peer, tag), transport.irecv(theirs, peer, tag))
        return int(theirs[0])

    assert [one.result(SECONDS) for one in on_threads(exchange, range(4))] == [1, 0, 3, 2]
    is_open = [[peer for peer, pair in enumerate(one._pairs) if pair.is_open] for one in started]
    assert is_open == [[1], [0], [3], [2]]
    assert [connected(one._control) for one in started] == [[1, 2, 3], [0], [0, 3], [0, 2]]


def test_all_may_connect_to_all_at_once(started):
    def exchange(rank: int) -> list[int]:
        transport, peers = started[rank], [peer for peer in range(4) if peer != rank]
        theirs = {peer: np.zeros(8, np.uint8) for peer in peers}
        receives = [transport.irecv(theirs[peer], peer, 1) for peer in peers]
        sends = [transport.isend(np.full(8, rank, np.uint8), peer, 1) for peer in peers]
        finished(transport, *receives, *sends)
        return [int(theirs[peer][0]) for peer in peers]

    everyones = [one.result(SECONDS) for one in on_threads(exchange, range(4))]
    assert everyones == [[peer for peer in range(4) if peer != rank] for rank in range(4)]


def test_a_transfer_that_only_one_end_wants_ends_with_the_transport(started):
    waiting = started[2].irecv(np.zeros(8, np.uint8), 1, 1)
    started[2].watch([waiting])
    assert not waiting.done()
    started[2].close(graceful=False)
    with pytest.raises(PeerLostError, match="the connection to rank 1 broke: this rank closed it"):
        finished(started[2], waiting)


def test_a_word_to_a_rank_whose_connection_broke_is_no_error_of_its_own(transports):
    """Who looks for lost ranks tells of it, with the names of both and after a goodbye that may have come."""
    ours, theirs = transports[0], transports[1]
    theirs.send_control(0, b"goodbye")
    theirs.close(graceful=False)

    def is_lost() -> bool:
        ours.send_control(1, b"a word" * 1000)
        return bool(ours.lost_peers())

    until(is_lost)
    ours.send_control(1, b"a word")
    assert ours.poll_control() == [(1, b"goodbye")]
    assert ours.lost_peers().keys() == {1}
