"""A group: some ranks of a transport, numbered from zero, as an algorithm sees them."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from hvdkit.transports.base import CACHE_LINE, Transfer, Transport

Array = npt.NDArray[Any]
T = TypeVar("T")
# An algorithm yields the transfers it cannot go on without, and returns its result.
Steps = Generator[list[Transfer], None, T]
Runs = Sequence[tuple[int, int]]  # the elements (begin, end) of each rank


class Choice(NamedTuple):
    """The inputs of the choice of an allreduce algorithm, besides the tensor; the same on all ranks of a group.

    Rank 0 measures them. The defaults are those of an Ethernet of 10 Gbit/s.
    """

    algorithm: str = "auto"  # or the name of an algorithm for every tensor
    latency_seconds: float = 50e-6  # of an exchange between two ranks, whatever its size
    seconds_per_byte: float = 1 / 1.25e9  # of the bytes that a rank sends


AUTO = Choice()


class Group:
    """The ranks ``members`` of a transport, in one order on all of them; ``rank`` is the index in ``members``."""

    def __init__(self, transport: Transport, members: Sequence[int], choice: Choice = AUTO) -> None:
        self.transport = transport
        self.choice = choice
        self.members = list(members)
        self.rank = self.members.index(transport.rank)
        self.size = len(self.members)
        self.bytes_sent = 0  # by this rank
        # Each rank begins with its successor, so that no rank is sent to by all at once.
        self.peers = tuple((self.rank + step) % self.size for step in range(1, self.size))
        self.layout: Any = None  # a hierarchical.Layout, where some members share memory

    def isend(self, array: Array, peer: int, tag: int) -> Transfer:
        self.bytes_sent += array.nbytes
        return self.transport.isend(array.view(np.uint8), self.members[peer], tag)

    def irecv(self, array: Array, peer: int, tag: int) -> Transfer:
        return self.transport.irecv(array.view(np.uint8), self.members[peer], tag)

    def sendrecv(self, outgoing: Array, receiver: int, incoming: Array, sender: int, tag: int) -> list[Transfer]:
        """Send and receive at once. Empty arrays do not travel; both ends know by the length."""
        transfers = []
        if incoming.size:
            transfers.append(self.irecv(incoming, sender, tag))
        if outgoing.size:
            transfers.append(self.isend(outgoing, receiver, tag))
        return transfers


def two_phase_bytes(nbytes: int, ranks: int) -> int:
    """Return the bytes that a rank sends of a tensor in two phases, or hands over within a node."""
    return 2 * nbytes * (ranks - 1) // ranks


def partition(count: int, parts: int, itemsize: int) -> list[tuple[int, int]]:
    """Cut ``count`` elements into ``parts`` ranges (start, stop) that start on cache lines. Late ones may be empty."""
    line = max(1, CACHE_LINE // itemsize)
    each, longer = divmod(-(-count // line), parts)
    cuts = [min(count, (part * each + min(part, longer)) * line) for part in range(parts + 1)]
    return list(pairwise(cuts))


def is_same(array: Array, other: Array) -> bool:
    """True if two arrays begin at one address."""
    return bool(array.ctypes.data == other.ctypes.data)


def equal_runs(count: int, parts: int) -> list[tuple[int, int]]:
    """Cut ``count`` elements into ``parts`` equal ranges (start, stop)."""
    each = count // parts
    return [(part * each, (part + 1) * each) for part in range(parts)]


def equal_parts(array: Array, parts: int) -> list[Array]:
    """Return ``parts`` equal parts of a flat array, as views."""
    return [array[start:stop] for start, stop in equal_runs(array.size, parts)]
