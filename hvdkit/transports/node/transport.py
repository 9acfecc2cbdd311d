"""A transport through memory that the ranks of a node share, in front of the transport to other nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

from hvdkit.kernels._native import Bell, MessageRings, Window
from hvdkit.transports.base import CACHE_LINE, Bytes, Layer, Transfer, Transport
from hvdkit.transports.node.memory import NodeMemory

# The rings of one pair of ranks. Larger ones leave the second-level cache, smaller ones make ranks wait for each other.
DATA_RING = 256 * 1024
CROWDED_DATA_RING = 32 * 1024
CROWDED = 16  # ranks: their rings are P * P
CONTROL_RING = 32 * 1024
# The interval at which the locks of the other ranks are looked at, each by a system call.
LOOK_SECONDS = 0.05


def _rings_bytes(ranks: int) -> tuple[int, int]:
    """Return the bytes of a data ring, and of the wake-ups of ``ranks`` ranks with the rings of each pair."""
    data_ring = DATA_RING if ranks <= CROWDED else CROWDED_DATA_RING
    return data_ring, ranks * CACHE_LINE + MessageRings.bytes_needed(ranks, data_ring, CONTROL_RING)


def window_bytes(ranks: int, size: int) -> int:
    """Return the bytes of a NodeTransport's window: the rings of ``ranks`` ranks, the signs of life of all ``size``."""
    return _rings_bytes(ranks)[1] + size * CACHE_LINE


class NodeTransport(Layer):
    """Messages through shared memory for the ranks of this node in ``inner.nodes``, and ``inner`` for other ranks.

    ``arenas`` are those of this node's ranks, by index in the node; None if a rank could not map it.
    """

    def __init__(self, inner: Transport, memory: NodeMemory, rings: Window, arenas: Sequence[Window | None]) -> None:
        super().__init__(inner)
        self.members = next(node for node in self.nodes if inner.rank in node)
        count = len(self.members)
        self.arenas = arenas
        self.memory = memory  # segment 0 of it is taken
        self.polling = inner.polling and count < inner.size
        self._index_of = {rank: index for index, rank in enumerate(self.members)}
        self.wakeups = [Bell(rings, index * CACHE_LINE) for index in range(count)]
        self.wakeup = self.wakeups[memory.index]
        data_ring, rings_bytes = _rings_bytes(count)
        self._messages = MessageRings(
            rings, count * CACHE_LINE, count, memory.index, data_ring, CONTROL_RING, self.wakeups
        )
        self.signs_of_life = (rings, rings_bytes)
        self._gone: dict[int, str] = {}
        self._next_look = 0.0

    def settle(self, carried: Sequence[int], unspoken: Sequence[int], agree: Callable[[], object]) -> None:
        self.inner.settle([*carried, *(member for member in self.members if member != self.rank)], unspoken, agree)

    def isend(self, buffer: Bytes, peer: int, tag: int) -> Transfer:
        index = self._index_of.get(peer)
        if index is None:
            return self.inner.isend(buffer, peer, tag)
        message: Transfer = self._messages.send(index, tag, buffer)
        message.peer = peer
        return message

    def irecv(self, buffer: Bytes, peer: int, tag: int) -> Transfer:
        index = self._index_of.get(peer)
        if index is None:
            return self.inner.irecv(buffer, peer, tag)
        message: Transfer = self._messages.receive(index, tag, buffer)
        message.peer = peer
        return message

    def receive_any(self, buffer: Bytes, peers: Sequence[int], tag: int) -> Transfer:
        """Receive from the first of the ranks ``peers`` of this node whose message under this tag comes."""
        message: Transfer = self._messages.receive_any([self._index_of[peer] for peer in peers], tag, buffer)
        message.peer = -1
        return message

    def withdraw(self, receive: Any) -> bool:
        """Take back a receive of this node for which no message has come. Returns False if one has."""
        return bool(self._messages.withdraw(receive))

    def send_control(self, peer: int, payload: bytes) -> None:
        index = self._index_of.get(peer)
        if index is None:
            self.inner.send_control(peer, payload)
        else:
            self._messages.send_control(index, payload)

    def advance(self) -> bool:
        moved = self._messages.progress()
        if len(self.members) < self.size:
            moved |= self.inner.advance()
        return moved

    def poll_control(self) -> list[tuple[int, bytes]]:
        taken = self._messages.take_control()
        messages = [(self.members[index], payload) for index, payload in taken] if taken else []
        if len(self.members) < self.size:
            messages += self.inner.poll_control()
        return messages

    def lost_peers(self) -> dict[int, str]:
        now = monotonic()
        if now >= self._next_look:
            self._next_look = now + LOOK_SECONDS
            for index in self.memory.gone():
                self._gone.setdefault(self.members[index], "its process ended")
        return {**self.inner.lost_peers(), **self._gone}

    def watch(self, transfers: Sequence[Transfer]) -> None:
        # Transfers within this node, also those with ``awaited`` (see Transfer.peer), move in ``advance``.
        outside = []
        for transfer in transfers:
            if transfer.peer not in self._index_of and not hasattr(transfer, "awaited"):
                outside.append(transfer)
        if outside:
            self.inner.watch(outside)

    def arenas_of(self, members: Sequence[int]) -> list[Window | None]:
        """Return the arenas of ranks of this node."""
        return [self.arenas[self._index_of[rank]] for rank in members]

    def wakeups_of(self, members: Sequence[int]) -> list[Bell]:
        """Return the wake-ups of ranks of this node."""
        return [self.wakeups[self._index_of[rank]] for rank in members]

    def close(self, graceful: bool) -> None:
        super().close(graceful)
        self.memory.close()
        self.arenas = ()  # large mappings: an engine that has ended may wait long for the garbage collector
