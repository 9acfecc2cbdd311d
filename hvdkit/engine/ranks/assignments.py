"""Numbers that all ranks share: tags of data messages, and the numbers that the coordinator assigns.

A tag is used again, but never by two operations that are open on one rank: messages of two ranks under one tag match
in the order in which they were posted. A named operation has the tags of its sequence number, and waits while an
operation with these tags is open (``Batches``). A lane has a number of its own while any rank may use the lane
(``LaneNumbers``); its tags number the ``SPAN`` operations of the lane that may be open at once, and more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence

# Named operations have the tags below this one, lanes those above.
LANE_TAG, TAGS_PER_OPERATION = 1 << 21, 8
NAMED_SEQUENCES = LANE_TAG // TAGS_PER_OPERATION
# A lane's tag: the lane's number, then the operation's number in the lane, then the phase of the operation.
LANES, SEQUENCE, PHASES = 2048, 128, 8
# Above those, an ordered operation's tag: its group's number, then its own, of which four are open at a time.
ORDERED_TAG, ORDERED_GROUPS, ORDERED_NUMBERS = LANE_TAG + LANES * SEQUENCE * PHASES, 1 << 14, 16
MESSAGE_TAG, MESSAGES = 1 << 24, 1 << 20  # messages that may be under way between two ranks
# How far the newest operation of a lane may be ahead of the oldest one that is open on a rank. Another rank can close
# that oldest operation when all have begun it, and be as far ahead of it again.
SPAN = SEQUENCE // 4


def named_tag(sequence: int) -> int:
    """Return the first tag of a batch of named operations."""
    return sequence % NAMED_SEQUENCES * TAGS_PER_OPERATION


def lane_tag(number: int, sequence: int) -> int:
    """Return the first tag of the ``sequence``-th operation of the lane that has this number."""
    assert 0 <= number < LANES
    return LANE_TAG | (number * SEQUENCE + sequence % SEQUENCE) * PHASES


def ordered_tag(group: int, number: int) -> int:
    """Return the first of the eight tags of an operation of a group of ordered operations."""
    return ORDERED_TAG + (group % ORDERED_GROUPS * ORDERED_NUMBERS + number % ORDERED_NUMBERS) * TAGS_PER_OPERATION


def message_tag(count: int) -> int:
    """Return the tag of the bytes of a rank's message number ``count`` to a rank of another node."""
    return MESSAGE_TAG + count % MESSAGES


class LaneNumbers:
    """The numbers in tags of the lanes that are open, on the coordinator.

    A number is free when all ranks have closed the lane after the same operation. Otherwise, or if the lane failed, the
    lane keeps its number: messages may still be under way.
    """

    def __init__(self) -> None:
        self._free: deque[int] = deque()  # given back, the longest ago first
        self._given = 0  # how many were ever given
        # By open lane: its number, its ranks, and how many operations each rank had begun when it closed the lane.
        self._open: dict[int, tuple[int, frozenset[int], dict[int, int]]] = {}

    def take(self, lane: int, ranks: Collection[int]) -> int | None:
        """Return a number for a new lane of these ranks, or None where all are taken."""
        if not self._free and self._given < LANES:
            self._free.append(self._given)
            self._given += 1
        if not self._free:
            return None
        number = self._free.popleft()
        self._open[lane] = number, frozenset(ranks), {}
        return number

    def closed(self, rank: int, lane: int, sequence: int) -> None:
        """Note that a rank has closed a lane. A rank that took part with zeros meanwhile reports it again."""
        if lane in self._open:
            number, ranks, closed = self._open[lane]
            closed[rank] = sequence
            if ranks == closed.keys() and len(set(closed.values())) == 1:
                del self._open[lane]
                self._free.append(number)


class Assignments:
    """The process sets, lanes and regions of the job, on the coordinator."""

    def __init__(self, size: int, static_process_sets: Iterable[Sequence[int]] = ()) -> None:
        # The ranks of each process set. Sets that were passed to ``init`` are numbered from 1.
        self.members = dict(enumerate([list(range(size)), *map(list, static_process_sets)]))
        self._process_sets = len(self.members) - 1  # the newest number
        self._lanes = 0  # the newest number
        self.joined: dict[int, None] = {}  # the ranks that have joined, in order
        self.lane_numbers = LaneNumbers()

    def add_process_set(self, ranks: Sequence[int]) -> int | None:
        """Return the number of a new set of these ranks, or None if there is one."""
        if list(ranks) in self.members.values():
            return None
        self._process_sets += 1
        self.members[self._process_sets] = list(ranks)
        return self._process_sets

    def next_lane(self, process_set: int) -> tuple[int, int | None]:
        """Return the id of a new lane, and its number in tags, None if all are taken."""
        self._lanes += 1
        return self._lanes, self.lane_numbers.take(self._lanes, self.members[process_set])
