"""A network in memory, for ranks of one process: on threads of their own, or resumed in turn by a loop."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable

from hvdkit.transports.base import Bytes, Transfer, Transport

Way = tuple[int, int, int]  # sender, receiver and tag


class Sent:
    """A send: done, since its bytes were copied."""

    def __init__(self, peer: int) -> None:
        self.peer = peer

    def done(self) -> bool:
        return True


class Received:
    """A receive, which takes its message when somebody asks whether it is done."""

    def __init__(self, wires: Wires, way: Way, buffer: Bytes) -> None:
        self.peer, self.buffer, self.arrived = way[0], buffer, False
        self._wires, self._way = wires, way

    def done(self) -> bool:
        if not self.arrived:
            self._wires.match(self._way)
        return self.arrived


class Wires:
    """What connects the ranks of one job. ``cut`` is what others see of a rank that has ended."""

    def __init__(self, size: int) -> None:
        self.lock = threading.Lock()
        self.messages: dict[Way, deque[Bytes]] = defaultdict(deque)
        self.receives: dict[Way, deque[Received]] = defaultdict(deque)
        self.control: list[deque[tuple[int, bytes]]] = [deque() for _ in range(size)]
        self.wakers: list[Callable[[], None]] = [lambda: None] * size
        self.lost: dict[int, str] = {}

    def match(self, way: Way) -> None:
        """Give messages to receives, both in the order in which they were posted, as the contract demands."""
        with self.lock:
            messages, receives = self.messages[way], self.receives[way]
            while messages and receives:
                receive, message = receives.popleft(), messages.popleft()
                assert message.nbytes == receive.buffer.nbytes, "a message of another size than was expected"
                receive.buffer[...] = message
                receive.arrived = True

    def cut(self, rank: int) -> None:
        self.lost[rank] = "its thread has ended"
        for waker in self.wakers:
            waker()


class MemoryTransport(Transport):
    """One rank's end of the network: event-driven, as sockets are."""

    name = "memory"
    polling = False
    beats = False

    def __init__(self, rank: int, size: int, wires: Wires) -> None:
        self.rank, self.size, self.wires = rank, size, wires

    def isend(self, buffer: Bytes, peer: int, tag: int) -> Transfer:
        if self.rank not in self.wires.lost:
            with self.wires.lock:
                self.wires.messages[self.rank, peer, tag].append(buffer.copy())
            self.wires.wakers[peer]()
        return Sent(peer)

    def irecv(self, buffer: Bytes, peer: int, tag: int) -> Transfer:
        way = peer, self.rank, tag
        receive = Received(self.wires, way, buffer)
        with self.wires.lock:
            self.wires.receives[way].append(receive)
        return receive

    def send_control(self, peer: int, payload: bytes) -> None:
        if self.rank not in self.wires.lost:
            self.wires.control[peer].append((self.rank, bytes(payload)))
            self.wires.wakers[peer]()

    def poll_control(self) -> list[tuple[int, bytes]]:
        inbox, arrived = self.wires.control[self.rank], []
        while inbox:
            arrived.append(inbox.popleft())
        return arrived

    def set_waker(self, waker: Callable[[], None]) -> None:
        self.wires.wakers[self.rank] = waker

    def lost_peers(self) -> dict[int, str]:
        return {rank: how for rank, how in self.wires.lost.copy().items() if rank != self.rank}

    def close(self, graceful: bool) -> None:
        self.wires.wakers[self.rank] = lambda: None
        self.wires.cut(self.rank)

    def abort(self, code: int) -> None:
        raise AssertionError("a rank in memory ends no job")
