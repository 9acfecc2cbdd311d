"""The ways of control messages: a node's ranks speak to other nodes through one of them, and these through rank 0.

So rank 0 hears each node, not each rank, and few ranks have connections to each other. Where a rank on the way is gone,
the next one takes its place.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from time import monotonic

from hvdkit.transports.base import Transport

# A message that somebody passes on begins with a byte with which no message itself does: then parts, one behind the
# other, each with whose words it has, for whom as a bit of each rank, and the words.
_PASSED_ON = b"\1"
_PART = struct.Struct("<III")  # the rank, the bytes of its receivers and of its words


class Routes:
    """Over whom ``rank`` reaches others; pure. ``nodes``: the ranks of each, ascending."""

    def __init__(self, rank: int, nodes: Sequence[Sequence[int]], gone: Collection[int] = ()) -> None:
        self.rank = rank
        self.size = sum(map(len, nodes))
        self._nodes = nodes
        first = {node: next((one for one in node if one not in gone), node[0]) for node in map(tuple, nodes)}
        self._speaker = [0] * self.size
        self._node = [0] * self.size
        for number, node in enumerate(first):
            for member in node:
                self._speaker[member], self._node[member] = first[node], number
        # Rank 0 as long as it is there, also for those that none of the rest needs any more.
        self.hub = next((one for one in range(self.size) if one not in gone), 0)

    def next_to(self, receiver: int) -> int:
        """The rank that is told what is for ``receiver``: itself, or one that passes it on."""
        return self._next(self.rank, receiver)

    def on_the_way_to(self, receiver: int) -> list[int]:
        """The ranks that pass on what is for ``receiver``."""
        way, at = [], self._next(self.rank, receiver)
        while at != receiver:
            way.append(at)
            at = self._next(at, receiver)
        return way

    def neighbours(self) -> set[int]:
        """The ranks with which this one speaks itself."""
        others = set(range(self.size)) - {self.rank}
        return {one for one in others if self._next(self.rank, one) == one or self._next(one, self.rank) == self.rank}

    def _next(self, at: int, receiver: int) -> int:
        if self._node[at] == self._node[receiver]:
            return receiver
        if at == self.hub:
            return self._speaker[receiver]
        return self.hub if at == self._speaker[at] else self._speaker[at]


class Relay:
    """Sends this rank's messages their ways, and passes on those of others.

    ``early``: what has come in already.
    """

    def __init__(self, transport: Transport, nodes: Sequence[Sequence[int]], early: list[tuple[int, bytes]]) -> None:
        self._transport = transport
        self._rank = transport.rank
        self._nodes = nodes
        self._early = early
        self._gone: frozenset[int] = frozenset()
        self._by_next: dict[int, int] = {}  # the receivers behind each rank that is told, as bits
        self._turned = 0  # those whose way has changed
        self.held: list[tuple[int, int, bytes]] = []  # what waits for its old way to be empty
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
        self._passes_on = len(self._nodes) > 1

    def avoid(self, gone: Iterable[int], settling_seconds: float) -> None:
        """From now on nothing goes over these ranks. What is on its old way has so long to arrive before the rest."""
        more = self._gone.union(gone)
        if more != self._gone:
            self._gone = more
            self._turn(Routes(self._rank, self._nodes, more))
            self._held_until = max(self._held_until, monotonic() + settling_seconds)

    def neighbours(self) -> Collection[int]:
        """The ranks to which this one speaks itself."""
        return self._by_next.keys()

    def send(self, receivers: Iterable[int], payload: bytes) -> None:
        """Send to other ranks."""
        if not self._passes_on:
            for receiver in receivers:
                self._transport.send_control(receiver, payload)
            return
        bits = 0
        for receiver in receivers:
            bits |= 1 << receiver
        self._send([(self._rank, bits, payload)])

    def poll(self) -> list[tuple[int, bytes]]:
        """What has come in for this rank, and from whom. Raises ValueError for what no relay sends."""
        if self.held and monotonic() >= self._held_until:
            held, self.held, self._turned = self.held, [], 0
            self._send(held)
        arrived, self._early = [*self._early, *self._transport.poll_control()], []
        if not self._passes_on:
            return arrived
        own, others = [], []
        for sender, payload in arrived:
            if payload[:1] != _PASSED_ON:
                own.append((sender, payload))
                continue
            for origin, bits, words in self._parts(sender, payload):
                if bits >> self._rank & 1:
                    own.append((origin, words))
                rest = bits & ~(1 << self._rank)
                if rest:
                    others.append((origin, rest, words))
        self._send(others)
        return own

    def _parts(self, sender: int, payload: bytes) -> Iterable[tuple[int, int, bytes]]:
        at, size = len(_PASSED_ON), self.routes.size
        while at < len(payload) or at == len(_PASSED_ON):
            origin, receivers, words = _PART.unpack(payload[at : at + _PART.size].ljust(_PART.size, b"\xff"))
            middle = at + _PART.size + receivers
            bits = int.from_bytes(payload[at + _PART.size : middle], "little")
            at = middle + words
            if at > len(payload) or origin >= size or bits >> size:
                raise ValueError(f"rank {sender} passed on {payload[:80]!r}, which is not whole, or not for this job")
            yield origin, bits, payload[middle:at]

    def _send(self, parts: Sequence[tuple[int, int, bytes]]) -> None:
        """All that goes over one rank is one message to it: whoever acts on its part has passed on the rest."""
        outgoing: dict[int, list[bytes]] = {}
        for origin, bits, words in parts:
            if waits := bits & self._turned if self.held or monotonic() < self._held_until else 0:
                self.held.append((origin, waits, words))
                bits &= ~waits
            for after, behind in self._by_next.items():
                mine = bits & behind
                if mine == 1 << after and origin == self._rank:
                    self._transport.send_control(after, words)
                elif mine:
                    receivers = mine.to_bytes((mine.bit_length() + 7) // 8, "little")
                    outgoing.setdefault(after, [_PASSED_ON]).extend(
                        (_PART.pack(origin, len(receivers), len(words)), receivers, words)
                    )
        for after, pieces in outgoing.items():
            self._transport.send_control(after, b"".join(pieces))
