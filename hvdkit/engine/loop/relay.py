"""Routes of control messages: a node's ranks reach other nodes through one of them, the speaker, and through rank 0.

If a speaker is gone, the next rank of its node takes over.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from time import monotonic

from hvdkit.transports.base import Transport

# Wire format of relayed messages. Byte 1 tells them from other messages. Then follow parts: a header, the receivers as
# a bit set of ranks, and the payload.
_RELAYED = b"\1"
_PART = struct.Struct("<III")  # the sender's rank, the bytes of the bit set, the bytes of the payload


class Routes:
    """The ranks over which ``rank`` reaches others; pure. ``nodes``: the ranks of each node, ascending."""

    def __init__(self, rank: int, nodes: Sequence[Sequence[int]], gone: Collection[int] = ()) -> None:
        self.rank = rank
        self.size = sum(map(len, nodes))
        self._speaker, self._node = [0] * self.size, [0] * self.size
        for number, node in enumerate(nodes):
            speaker = next((member for member in node if member not in gone), node[0])
            for member in node:
                self._speaker[member], self._node[member] = speaker, number
        # Rank 0 until it is gone, also for ranks that no other rank needs any more.
        self.hub = next((member for member in range(self.size) if member not in gone), 0)

    def next_to(self, receiver: int) -> int:
        """Return the rank to which messages for ``receiver`` are sent: itself, or a rank that passes them on."""
        return self._next(self.rank, receiver)

    def on_the_way_to(self, receiver: int) -> list[int]:
        """Return the ranks that pass on messages for ``receiver``."""
        way, at = [], self._next(self.rank, receiver)
        while at != receiver:
            way.append(at)
            at = self._next(at, receiver)
        return way

    def neighbours(self) -> set[int]:
        """Return the ranks with which this rank exchanges messages directly."""
        others = set(range(self.size)) - {self.rank}
        return {peer for peer in others if self.next_to(peer) == peer or self._next(peer, self.rank) == self.rank}

    def _next(self, at: int, receiver: int) -> int:
        if self._node[at] == self._node[receiver]:
            return receiver
        if at == self.hub:
            return self._speaker[receiver]
        return self.hub if at == self._speaker[at] else self._speaker[at]


class Relay:
    """The sender of this rank's messages, which passes on others'. ``leftover``: messages that have come in already."""

    def __init__(self, transport: Transport, nodes: Sequence[Sequence[int]], leftover: list[tuple[int, bytes]]) -> None:
        self._transport, self._rank, self._nodes, self._leftover = transport, transport.rank, nodes, leftover
        self._passes_on = len(nodes) > 1
        self._gone: frozenset[int] = frozenset()
        self._by_next: dict[int, int] = {}  # bit set of the receivers behind each rank that messages are sent to
        self._turned = 0  # bit set of the receivers whose route has changed
        self.held: list[tuple[int, int, bytes]] = []  # parts that wait for their old route to be empty
        self._held_until = 0.0
        self._turn(Routes(self._rank, nodes))

    def _turn(self, routes: Routes) -> None:
        self.routes = routes
        ways: dict[int, int] = defaultdict(int)
        for receiver in range(routes.size):
            if receiver != self._rank:
                ways[routes.next_to(receiver)] |= 1 << receiver
        if not self.held and monotonic() >= self._held_until:
            self._turned = 0
        for after, behind in ways.items():
            self._turned |= behind & ~self._by_next.get(after, 0)
        self._by_next = ways

    def avoid(self, gone: Iterable[int], settling_seconds: float) -> None:
        """Route messages around these ranks. Later messages wait so long for those that are on their old route."""
        more = self._gone.union(gone)
        if more != self._gone:
            self._gone = more
            self._turn(Routes(self._rank, self._nodes, more))
            self._held_until = max(self._held_until, monotonic() + settling_seconds)

    def is_neighbour(self, rank: int) -> bool:
        """True if messages for ``rank`` are sent to it directly."""
        return rank in self._by_next

    def send(self, receivers: Iterable[int], payload: bytes) -> None:
        """Send a message to other ranks."""
        if not self._passes_on:
            for receiver in receivers:
                self._transport.send_control(receiver, payload)
            return
        bits = 0
        for receiver in receivers:
            bits |= 1 << receiver
        self._send([(self._rank, bits, payload)])

    def poll(self) -> list[tuple[int, bytes]]:
        """Return the (sender, message) pairs for this rank. Raises ValueError for bytes that no relay sends."""
        if self.held and monotonic() >= self._held_until:
            held, self.held, self._turned = self.held, [], 0
            self._send(held)
        arrived, self._leftover = [*self._leftover, *self._transport.poll_control()], []
        if not self._passes_on:
            return arrived
        own, others = [], []
        for sender, payload in arrived:
            if payload[:1] != _RELAYED:
                own.append((sender, payload))
                continue
            for origin, bits, message in self._parts(sender, payload):
                if bits >> self._rank & 1:
                    own.append((origin, message))
                if rest := bits & ~(1 << self._rank):
                    others.append((origin, rest, message))
        self._send(others)
        return own

    def _parts(self, sender: int, payload: bytes) -> Iterable[tuple[int, int, bytes]]:
        at, size = len(_RELAYED), self.routes.size
        while at < len(payload) or at == len(_RELAYED):
            origin, receivers, length = _PART.unpack(payload[at : at + _PART.size].ljust(_PART.size, b"\xff"))
            middle = at + _PART.size + receivers
            bits = int.from_bytes(payload[at + _PART.size : middle], "little")
            at = middle + length
            if at > len(payload) or origin >= size or bits >> size:
                raise ValueError(f"rank {sender} passed on {payload[:80]!r}, which is incomplete or for another job")
            yield origin, bits, payload[middle:at]

    def _send(self, parts: Sequence[tuple[int, int, bytes]]) -> None:
        """Send parts. Those for one next rank are one message: a rank passes on the rest before it acts on its part."""
        outgoing: dict[int, list[bytes]] = {}
        for origin, bits, payload in parts:
            is_settling = bool(self.held) or monotonic() < self._held_until
            if is_settling and (waits := bits & self._turned):
                self.held.append((origin, waits, payload))
                bits &= ~waits
            for after, behind in self._by_next.items():
                bound = bits & behind
                if bound == 1 << after and origin == self._rank:
                    self._transport.send_control(after, payload)
                elif bound:
                    receivers = bound.to_bytes((bound.bit_length() + 7) // 8, "little")
                    outgoing.setdefault(after, [_RELAYED]).extend(
                        (_PART.pack(origin, len(receivers), len(payload)), receivers, payload)
                    )
        for after, pieces in outgoing.items():
            self._transport.send_control(after, b"".join(pieces))
