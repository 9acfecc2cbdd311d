"""Ranks of one node talk through memory that they share, whatever transport carries bytes to other nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic

from hvdkit.kernels._native import Bell, Message, Post, Window
from hvdkit.transports.base import CACHE_LINE, Bytes, Layer, Transfer, Transport
from hvdkit.transports.node.memory import NodeMemory

# The rings of one pair of ranks. Larger ones leave the second-level cache, smaller ones make ranks wait for each other.
DATA_RING = 256 * 1024
CROWDED_DATA_RING = 32 * 1024
CROWDED = 16  # ranks: their rings are P * P
CONTROL_RING = 32 * 1024
# How often the locks of the other ranks are looked at, which is one system call each.
LOOK_SECONDS = 0.05


def _data_ring(ranks: int) -> int:
    return DATA_RING if ranks <= CROWDED else CROWDED_DATA_RING


def _rings_bytes(ranks: int) -> int:
    """The wake-ups of so many ranks of a node, and the rings of each pair."""
    return ranks * CACHE_LINE + Post.bytes_needed(ranks, _data_ring(ranks), CONTROL_RING)


def window_bytes(ranks: int, size: int) -> int:
    """The window of a NodeTransport of ``ranks`` of a node in a job of ``size``: also the signs of life of all."""
    return _rings_bytes(ranks) + size * CACHE_LINE


def _transfer(message: Message, peer: int) -> Transfer:
    message.peer = peer
    return message


class NodeTransport(Layer):
    """``inner`` for ranks elsewhere, shared memory for those of this node as ``inner.nodes`` has it."""

    def __init__(
        self, inner: Transport, memory: NodeMemory, rings: Window, arenas: Sequence[Window | None] = ()
    ) -> None:
        super().__init__(inner)
        # Where this node's ranks map each other's gradients, by index in the node; None where not all of them do.
        self.arenas = list(arenas) or [None] * len(next(node for node in inner.nodes if inner.rank in node))
        self.members = next(node for node in self.nodes if inner.rank in node)
        self.memory = memory  # segment 0 of it is taken
        self.polling = inner.polling and len(self.members) < inner.size
        self._index_of = {rank: index for index, rank in enumerate(self.members)}
        count = len(self.members)
        self.wakeups = [Bell(rings, index * CACHE_LINE) for index in range(count)]
        self.wakeup = self.wakeups[memory.index]
        self._messages = Post(
            rings, count * CACHE_LINE, count, memory.index, _data_ring(count), CONTROL_RING, self.wakeups
        )
        self.signs_of_life = (rings, _rings_bytes(count))
        self._gone: dict[int, str] = {}
        self._next_look = 0.0

    def settle(self, carried: Sequence[int], unspoken: Sequence[int], agree: Callable[[], object]) -> None:
        self.inner.settle([*carried, *(member for member in self.members if member != self.rank)], unspoken, agree)

    def isend(self, buffer: Bytes, peer: int, tag: int) -> Transfer:
        index = self._index_of.get(peer)
        if index is None:
            return self.inner.isend(buffer, peer, tag)
        return _transfer(self._messages.send(index, tag, buffer), peer)

    def irecv(self, buffer: Bytes, peer: int, tag: int) -> Transfer:
        index = self._index_of.get(peer)
        if index is None:
            return self.inner.irecv(buffer, peer, tag)
        return _transfer(self._messages.receive(index, tag, buffer), peer)

    def send_control(self, peer: int, payload: bytes) -> None:
        index = self._index_of.get(peer)
        if index is None:
            self.inner.send_control(peer, payload)
        else:
            self._messages.send_control(index, payload)

    def advance(self) -> bool:
        moved = self._messages.progress()
        return self.inner.advance() or moved if len(self.members) < self.size else moved

    def poll_control(self) -> list[tuple[int, bytes]]:
        messages = [(self.members[index], payload) for index, payload in self._messages.take_control()]
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
        # What waits for ranks of this node tells which (see Transfer.peer), and is moved by ``advance``.
        outside = [one for one in transfers if one.peer not in self._index_of and not hasattr(one, "awaited")]
        if outside:
            self.inner.watch(outside)

    def arenas_of(self, members: Sequence[int]) -> list[Window | None]:
        """The arenas of ranks of this node."""
        return [self.arenas[self._index_of[rank]] for rank in members]

    def wakeups_of(self, members: Sequence[int]) -> list[Bell]:
        """The wake-ups of ranks of this node."""
        return [self.wakeups[self._index_of[rank]] for rank in members]

    def close(self, graceful: bool) -> None:
        super().close(graceful)
        self.memory.close()
