"""Some ranks of a transport, numbered from zero: what an algorithm sees of the world."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from hvdkit.collectives.choice import AUTO, Choice
from hvdkit.transports.base import CACHE_LINE, Bytes, Transfer, Transport

Array = npt.NDArray[Any]
T = TypeVar("T")
# An algorithm yields the transfers it cannot go on without, and returns its result.
Steps = Generator[list[Transfer], None, T]
Runs = Sequence[tuple[int, int]]  # the elements (begin, end) of each rank


class Group:
    """The ranks ``members`` of a transport, in one order on all of them; ``rank`` is the index in ``members``.

    Counts the payload bytes that this rank sends, so that an algorithm's traffic can be held against its formula.
    ``choice`` is how an allreduce among these ranks chooses its algorithm: the same on all of them.
    """

    def __init__(self, transport: Transport, members: Sequence[int], choice: Choice = AUTO) -> None:
        self.transport = transport
        self.choice = choice
        self.members = list(members)
        self.rank = self.members.index(transport.rank)
        self.size = len(self.members)
        self.bytes_sent = 0
        # Everyone else, each rank beginning with the one after itself so that no rank is sent to by all at once.
        self.peers = tuple((self.rank + step) % self.size for step in range(1, self.size))
        self.layout: Any = None  # how the members lie on nodes that share memory; see hierarchical.Layout

    def isend(self, array: Array, peer: int, tag: int) -> Transfer:
        self.bytes_sent += array.nbytes
        return self.transport.isend(as_bytes(array), self.members[peer], tag)

    def irecv(self, array: Array, peer: int, tag: int) -> Transfer:
        return self.transport.irecv(as_bytes(array), self.members[peer], tag)

    def sendrecv(self, outgoing: Array, receiver: int, incoming: Array, sender: int, tag: int) -> list[Transfer]:
        """Both at once. What is empty does not travel; both ends know by its length."""
        transfers = []
        if incoming.size:
            transfers.append(self.irecv(incoming, sender, tag))
        if outgoing.size:
            transfers.append(self.isend(outgoing, receiver, tag))
        return transfers


def as_bytes(array: Array) -> Bytes:
    """The memory of a flat contiguous array as bytes, without a copy."""
    return array.view(np.uint8)


def two_phase_bytes(nbytes: int, ranks: int) -> int:
    """What a rank sends of a tensor in two phases, or hands over within a node for the sum and the pass back."""
    return 2 * nbytes * (ranks - 1) // ranks


def partition(count: int, parts: int, itemsize: int) -> list[tuple[int, int]]:
    """Cut ``count`` elements into ``parts`` runs (start, stop) that start on cache lines. Late runs may be empty."""
    line = max(1, CACHE_LINE // itemsize)
    lines = -(-count // line)
    each, longer = divmod(lines, parts)
    bounds = []
    start = 0
    for part in range(parts):
        stop = min(count, start + (each + (part < longer)) * line)
        bounds.append((start, stop))
        start = stop
    return bounds
