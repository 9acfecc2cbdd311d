"""The tags of data messages, of which there are as many as every MPI has. An operation has some of its own.

A tag is used again, but never by two operations that are open on one rank: messages of two ranks under one tag match in
the order in which they were posted, so those of the earlier operation go first on both ends.

- A named operation has the tags of its sequence number. It waits while an operation with these tags is open
  (``Batches``); all ranks have asked for that one, so that it ends whatever they do next.
- A lane has a number of its own as long as any rank may be at it (``LaneNumbers``), and in it a place for each of
  ``SPAN`` operations that may be open, and more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

# Named operations have the tags below this one, lanes those above.
LANE_TAG = 1 << 21
TAGS_PER_OPERATION = 8
NAMED_SEQUENCES = LANE_TAG // TAGS_PER_OPERATION
# Of a lane's tags: the lane's number, then the operation's place in the lane, then the phase of the operation.
LANES, SEQUENCE, PHASES = 2048, 128, 8
# How far the newest operation of a lane may be ahead of the oldest one that is open on a rank. Other ranks, which are
# through with an operation when all have begun it, may be as far ahead of that one again.
SPAN = SEQUENCE // 4


def named_tag(sequence: int) -> int:
    """The first tag of a batch of named operations."""
    return sequence % NAMED_SEQUENCES * TAGS_PER_OPERATION


def lane_tag(number: int, sequence: int) -> int:
    """The first tag of the ``sequence``-th operation of the lane that has this number."""
    assert 0 <= number < LANES
    return LANE_TAG | (number * SEQUENCE + sequence % SEQUENCE) * PHASES


class LaneNumbers:
    """The numbers in tags of the lanes that are open, on the coordinator.

    Ranks say up to which operation they have closed a lane. When all say the same, all that was begun has ended on all
    ranks, and the number is free. A lane that failed, or whose ranks closed it at different operations, keeps it:
    messages of that lane may still be under way.
    """

    def __init__(self) -> None:
        self._free: deque[int] = deque()  # given back, the longest ago first
        self._given = 0  # how many were ever given
        self._open: dict[int, tuple[int, frozenset[int]]] = {}  # by lane: the number, and the ranks
        self._closed: dict[int, dict[int, int]] = {}  # by lane and rank: operations begun, none of them open

    def take(self, lane: int, ranks: Collection[int]) -> int | None:
        """Return a number for a new lane of these ranks, or None where all are taken."""
        if not self._free and self._given < LANES:
            self._free.append(self._given)
            self._given += 1
        if not self._free:
            return None
        number = self._free.popleft()
        self._open[lane] = number, frozenset(ranks)
        self._closed[lane] = {}
        return number

    def closed(self, rank: int, lane: int, sequence: int) -> None:
        """Note that a rank has closed a lane. It may say so again, as when it has taken part with zeros meanwhile."""
        if lane not in self._open:
            return
        number, ranks = self._open[lane]
        closed = self._closed[lane]
        closed[rank] = sequence
        if ranks == closed.keys() and len(set(closed.values())) == 1:
            del self._open[lane], self._closed[lane]
            self._free.append(number)
