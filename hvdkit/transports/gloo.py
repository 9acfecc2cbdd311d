"""A transport between ranks that know each other, over a Gloo process group of torch.distributed.

Gloo connects two ranks when both use the connection, and makes the first one wait for the second. Therefore each rank
tells the other that it wants the connection, and uses it when both want it.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from hvdkit.errors import AuthenticationError, PeerLostError
from hvdkit.transports.base import Bytes, Exchange, Transfer, Transport
from hvdkit.transports.control import ControlConnections
from hvdkit.transports.gloo_group import open_gloo
from hvdkit.transports.gpu.device import DeviceCollectives
from hvdkit.transports.gpu.streams import DeviceTransfer
from hvdkit.transports.link import MESSAGE, PAIR
from hvdkit.transports.security.admission import NEVER, Admission, prove
from hvdkit.transports.waiters import Waiters

logger = logging.getLogger("hvdkit")

PROOF_TAG = 1 << 26  # above every tag of a collective
# Transfers of at most so many bytes never wait for others: there latency counts.
SMALL_BYTES = 1 << 16


class GlooTransfer:
    """A send or receive of the process group, which a waiter thread completes; see ``GlooTransport.watch``."""

    __slots__ = ("_error", "_finished", "_work", "begun", "buffer", "peer")

    def __init__(self, buffer: Bytes, peer: int) -> None:
        self.peer = peer
        self.buffer = buffer  # Gloo reads or writes it until the work is done
        self._work: Any = None
        self.begun: threading.Event | None = None  # where ``wait`` blocks until ``begin`` or ``fail`` is called
        self._finished = False
        self._error: Exception | None = None

    def begin(self, call: Callable[..., Any], tag: int) -> None:
        """Hand the buffer to Gloo. An error is kept for ``done()``."""
        try:
            self._work = call([torch.from_numpy(self.buffer)], self.peer, tag)
        except RuntimeError as error:
            self._error = error
        if self.begun is not None:
            self.begun.set()

    def fail(self, error: Exception) -> None:
        """Keep ``error`` for ``done()``: the connection was not made."""
        self._error = error
        if self.begun is not None:
            self.begun.set()

    def wait(self) -> None:
        """Block until done, on a waiter thread. An error is kept for ``done()``."""
        if self.begun is not None:
            self.begun.wait()
        if self._work is not None:
            try:
                self._work.wait(NEVER)
            except Exception as error:  # raised by done(), where the engine names tensor and rank
                self._error = error
        self._finished = True

    def done(self) -> bool:
        """True if the buffer may be used again. Raises PeerLostError if the connection broke."""
        if self._finished and self._error is not None:
            reason = str(self._error).splitlines()[0]
            raise PeerLostError(f"the connection to rank {self.peer} broke: {reason}", self.peer) from self._error
        return self._finished


class _Pair:
    """The state of Gloo's connections to a peer: both ends want them, then they are made and proven, or have failed.

    ``made``: how many are made, of which there is one for each address. Before ``is_open``, the peer has not proven
    over each that it is a rank of the session.
    """

    __slots__ = ("error", "is_open", "is_wanted", "made", "peer_wants", "waiting")

    def __init__(self) -> None:
        self.is_wanted = self.peer_wants = self.is_open = False
        self.made = 0
        self.error: Exception | None = None
        self.waiting: list[tuple[GlooTransfer, str, int]] = []


class GlooTransport(Transport):
    """A transport over a ProcessGroupGloo of its own, which connects late.

    Ranks open connections for control messages to the listeners of ``admission``; ``listener`` is this rank's. Gloo
    listens at ``addresses``.
    """

    name = "gloo"
    polling = False
    closing_seconds = 1.0  # for which ``close`` waits for threads that are inside of Gloo

    def __init__(
        self, rank: int, size: int, addresses: Sequence[str], listener: socket.socket, admission: Admission
    ) -> None:
        self.rank, self.size, self._session = rank, size, admission.session
        self._group, self._book = open_gloo(rank, size, addresses)
        self._contexts = len(addresses)  # of Gloo, of which each serves the tags with one remainder
        self._waker: Callable[[], None] = lambda: None
        self._waiters = Waiters("hvdkit-wait")
        self._inbox: deque[tuple[int, bytes]] = deque()
        self._lost: dict[int, str] = {}
        self._pairs = [_Pair() for _ in range(size)]
        self._pairs_lock = threading.Lock()
        self._device_collectives: list[DeviceCollectives] = []
        self._control = ControlConnections(
            rank, listener, admission.addresses, admission.session, self._receive, self._lose
        )
        if rank:
            self._control.send(0, MESSAGE, b"")  # so that rank 0 notices the end of this rank from now on

    def start(self, exchange: Exchange, start_seconds: float, silence_seconds: float) -> Transport:
        self._book.exchange(exchange)
        return self

    def isend(self, buffer: Bytes, peer: int, tag: int) -> GlooTransfer:
        return self._post("send", buffer, peer, tag)

    def irecv(self, buffer: Bytes, peer: int, tag: int) -> GlooTransfer:
        return self._post("recv", buffer, peer, tag)

    def _post(self, call: str, buffer: Bytes, peer: int, tag: int) -> GlooTransfer:
        transfer = GlooTransfer(buffer, peer)
        pair = self._pairs[peer]
        if not pair.is_open:
            with self._pairs_lock:
                if pair.error is not None:
                    transfer.fail(pair.error)
                    return transfer
                if not pair.is_open:
                    transfer.begun = threading.Event()
                    pair.waiting.append((transfer, call, tag))
                    if not pair.is_wanted:
                        pair.is_wanted = True
                        self._control.send(peer, PAIR, b"")
                        if pair.peer_wants:
                            self._waiters.run(partial(self._connect, peer))
                    return transfer
        transfer.begin(getattr(self._group, call), tag)
        return transfer

    def _connect(self, peer: int) -> None:
        """Have Gloo connect to ``peer``, which wants it too, and check its proofs. Runs on a waiter thread."""
        pair = self._pairs[peer]
        error: Exception | None = None
        try:
            for context in range(self._contexts):
                connected = partial(setattr, pair, "made", context + 1)
                prove(self._group, self.rank, peer, self._session, PROOF_TAG + context, connected)
        except (RuntimeError, AuthenticationError) as problem:
            error = problem
        with self._pairs_lock:
            self._end_waiting(pair, error)
            pair.is_open = pair.error is None

    def _end_waiting(self, pair: _Pair, error: Exception | None) -> None:
        """Begin the transfers that wait for a connection, or let them fail with the error. Under the lock."""
        pair.error = pair.error or error
        for transfer, call, tag in pair.waiting:
            if pair.error is None:
                transfer.begin(getattr(self._group, call), tag)
            else:
                transfer.fail(pair.error)
        pair.waiting.clear()

    def watch(self, transfers: Sequence[Transfer]) -> None:
        """Complete these transfers on a waiter thread, then call the waker."""

        def wait_for_all() -> None:
            for transfer in transfers:
                assert isinstance(transfer, (GlooTransfer, DeviceTransfer))
                transfer.wait()
            self._waker()

        nbytes = sum(transfer.buffer.nbytes for transfer in transfers if isinstance(transfer, GlooTransfer))
        run = self._waiters.run if nbytes <= SMALL_BYTES else self._waiters.run_in_turn
        run(wait_for_all)

    def advance(self) -> bool:
        self._waiters.relieve()
        return False

    def send_control(self, peer: int, payload: bytes) -> None:
        self._control.send(peer, MESSAGE, payload)

    def poll_control(self) -> list[tuple[int, bytes]]:
        return [self._inbox.popleft() for _ in range(len(self._inbox))]

    def set_waker(self, waker: Callable[[], None]) -> None:
        self._waker = waker

    def lost_peers(self) -> dict[int, str]:
        return dict(self._lost)

    def _receive(self, peer: int, kind: int, payload: bytes) -> None:
        if kind == PAIR:
            pair = self._pairs[peer]
            with self._pairs_lock:
                is_news = not pair.peer_wants
                pair.peer_wants = True
                if is_news and pair.is_wanted and pair.error is None:
                    self._waiters.run(partial(self._connect, peer))
        elif payload:
            self._inbox.append((peer, payload))
            self._waker()

    def _lose(self, peer: int, reason: str) -> None:
        self._lost[peer] = reason
        self._waker()

    def settle(self, carried: Sequence[int], unspoken: Sequence[int], agree: Callable[[], object]) -> None:
        needless = {*carried, *unspoken}
        for peer in set(range(self.rank)) - needless:
            self._control.send(peer, MESSAGE, b"")  # from now on the end of that connection tells of a loss
        self._control.let_go(needless)  # before another rank breaks its connection to this one
        agree()
        if len(carried) == self.size - 1:
            self._end()
            self._waiters = Waiters("hvdkit-wait")
        else:
            self._control.drop()

    def close(self, graceful: bool) -> None:
        """Break the connections, so that all threads of this transport end before the process does."""
        self._waker = lambda: None
        for collectives in self._device_collectives:
            collectives.close()  # ends the waits of waiter threads for a device
        self._device_collectives.clear()
        self._end()

    def _end(self) -> None:
        """Give back connections, threads and Gloo's memory."""
        self._control.close()
        with self._pairs_lock:
            for pair in self._pairs:
                self._end_waiting(pair, RuntimeError("this rank closed it"))
            made = [pair.made for pair in self._pairs] if self._group is not None else []
        for peer, connections in enumerate(made):
            for context in range(connections):  # a receive from another one would wait for the peer to connect
                tag = PROOF_TAG + self._contexts + context
                try:  # Gloo has no call that closes a connection, but breaks it where a wait times out
                    nothing = torch.empty(1, dtype=torch.uint8)
                    self._group.recv([nothing], peer, tag).wait(timedelta(milliseconds=1))
                except RuntimeError as error:
                    logger.debug("closed the connection to rank %d: %s", peer, str(error).splitlines()[0])
        self._waiters.close(self.closing_seconds)
        self._group = None

    def abort(self, code: int) -> None:
        """Do nothing: when this process ends, the peers notice their broken connections."""
