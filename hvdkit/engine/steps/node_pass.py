"""A lane's gradients on one node: each rank says where its own lie, and reduces its share of everyone's in one pass.

A window of the node's memory has counters ("ready" and "done" for each operation under way), when each rank was ready,
a table in which each rank writes where it has each gradient, a region of each rank for its small gradients, and slots
for chunks of gradients that others cannot reach where they lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from hvdkit.collectives.group import Array, Group
from hvdkit.collectives.staging import Staging, staging_bytes
from hvdkit.engine.ranks.assignments import SPAN
from hvdkit.engine.ranks.groups import lane_segment
from hvdkit.engine.steps.block import Block, block_offsets, pages
from hvdkit.engine.steps.plan import Slot
from hvdkit.kernels import DTYPES, NAMES, ReduceOp, Scale
from hvdkit.transports.base import CACHE_LINE

if TYPE_CHECKING:
    from hvdkit.transports.node.transport import NodeTransport

# Counters of each rank, used in turn. A rank's operations in flight lie within half as many, so a counter is used again
# only when this rank is through with its last use, and others wait for no less than what it says.
CELLS = 2 * SPAN


class Where(IntEnum):
    """Where a rank has its gradient; the numbers are those of csrc/in_place.h."""

    ELSEWHERE = 0
    ARENA = 1
    REGION = 2
    ZEROS = 3


class Direction(IntEnum):
    """Between the gradients of all ranks and one flat array; the numbers are those of csrc/in_place.h."""

    ALL = 0
    GATHER = 1
    SPREAD = 2


class CellWait:
    """A wait, like a transfer, until another rank's counter has reached a number."""

    __slots__ = ("_cells", "_index", "_number", "peer")

    def __init__(self, cells: Any, index: int, number: int, peer: int) -> None:
        self._cells, self._index, self._number = cells, index, number
        self.peer = peer

    def done(self) -> bool:
        return bool(self._cells.get(self._index) >= self._number)


class Order:
    """Operations go through here in the order of their numbers; most have nothing to do here, and say so at once."""

    def __init__(self, first: int) -> None:
        self.passed = first  # all operations with lower numbers are through
        self._left: set[int] = set()

    def leave(self, number: int) -> None:
        """This operation is through, or need not go through."""
        self._left.add(number)
        while self.passed in self._left:
            self._left.remove(self.passed)
            self.passed += 1


class NodePass:
    """The window of one lane, and this rank's index among the ``members`` of its node (ranks of the transport).

    ``holds_all``: large gradients have a place in each rank's region too.
    """

    def __init__(
        self,
        transport: NodeTransport,
        members: Sequence[int],
        segment: int,
        slots: Sequence[Slot],
        spin_seconds: float,
        holds_all: bool = False,
    ) -> None:
        from hvdkit.kernels._native import Cells, InPlace

        self.members = list(members)
        self._under_way: set[int] = set()  # operations that this rank is ready for and not through with
        self._withdrawn = False
        self.me = self.members.index(transport.rank)
        self._transport, self._segment = transport, segment
        self._wakeups = transport.wakeups_of([rank for rank in self.members if rank != transport.rank])
        count = len(self.members)
        offsets, block_bytes = block_offsets(slots, holds_all)
        cells_bytes = 2 * count * CELLS * CACHE_LINE
        table_begin = cells_bytes + count * CELLS * np.dtype(np.float64).itemsize
        self._head_bytes = pages(table_begin + InPlace.table_bytes(count, len(slots)))
        self._region_bytes = pages(block_bytes)
        staging_begin = self._head_bytes + count * self._region_bytes
        self.window: Any = transport.memory.window(segment, staging_begin + staging_bytes(count))
        self._cells = Cells(self.window, 0, 2 * count * CELLS)
        self._in_place = InPlace(
            self.window,
            table_begin,
            self.me,
            [
                (_dtype_number(slot), slot.elements, offset)
                for slot, offset in zip(slots, offsets, strict=True)
            ],
            [self._region(rank) for rank in range(count)],
            self._region_bytes,
            transport.arenas_of(self.members),
        )  # fmt: skip
        wakeups = transport.wakeups_of(self.members)
        self.staging = Staging(self.members, transport.rank, self.window, staging_begin, wakeups, spin_seconds)
        window: Array = np.frombuffer(memoryview(self.window), dtype=np.uint8)
        self._ready_at: Array = window[cells_bytes:table_begin].view(np.float64).reshape(count, CELLS)
        region = self._region(self.me)
        self.block = Block(window[region : region + self._region_bytes], slots, offsets)
        for slot in self.block.places:
            self._in_place.offer(slot, Where.REGION)

    def _region(self, rank: int) -> int:
        return self._head_bytes + rank * self._region_bytes

    def populate(self) -> None:
        """Take memory for all ranks' small gradients now, this one's first. Raises OSError where there is not enough.

        What they have in common goes with this rank's.
        """
        self._transport.memory.populate(self.window, self._segment, 0, self._head_bytes)
        for step in range(len(self.members) if self._region_bytes else 0):
            rank = (self.me + step) % len(self.members)
            begin = self._region(rank)
            self._transport.memory.populate(self.window, self._segment, begin, self._region_bytes)

    def offer(self, slot: int, where: Where, offset: int = 0) -> None:
        """This rank's gradient of a large slot lies there, at an offset of its arena."""
        self._in_place.offer(slot, where, offset)

    def ready(self, number: int, absent: bool) -> list[CellWait]:
        """Say that this rank's gradients of an operation are where the table has them, or that it has none."""
        self._under_way.add(number)
        self._ready_at[self.me, number % CELLS] = perf_counter()  # one clock for the processes of a host
        return self._tell_and_wait(0, number, 2 * (number + 1) + int(absent), 2 * (number + 1))

    def ready_at(self, number: int) -> dict[int, float]:
        """When each rank of the node (of the transport) was ready for an operation, by perf_counter, once all are."""
        return dict(zip(self.members, self._ready_at[:, number % CELLS].tolist(), strict=True))

    def done(self, number: int) -> list[CellWait]:
        """Say that this rank is through with all ranks' gradients of an operation."""
        return self._tell_and_wait(1, number, number + 1, number + 1)

    def over(self, number: int) -> None:
        """All ranks are through with an operation."""
        self._under_way.discard(number)

    def withdraw(self) -> None:
        """Take back that this rank is ready, before its gradients go from where the table has them.

        Who reads there afterwards finds this out by ``withdrawn`` before it passes on what it made of that. This rank
        tells nothing about any operation from now on.
        """
        self._withdrawn = True
        for number in list(self._under_way):
            self._cells.set(self._index(0, self.me, number), 0)

    def withdrawn(self, number: int) -> list[CellWait]:
        """Waits without an end if some rank has withdrawn: what was summed since all were ready may be wrong."""
        waits = [
            CellWait(self._cells, self._index(0, rank, number), 2 * (number + 1), member)
            for rank, member in enumerate(self.members)
        ]
        return [] if all(wait.done() for wait in waits) else waits

    def absent(self, number: int) -> list[bool]:
        """The ranks that contribute zeros to an operation, once all are ready."""
        return [bool(self._cells.get(self._index(0, rank, number)) & 1) for rank in range(len(self.members))]

    def staged(self, slots: Sequence[int], absent: list[bool]) -> list[int]:
        """Those of the slots that some rank has where others cannot reach it: the same on all ranks of the node."""
        return self._in_place.staged(slots, absent)

    def run(
        self,
        direction: Direction,
        slots: Sequence[int],
        offsets: Sequence[int],
        share: tuple[int, int],
        op: ReduceOp,
        scale: Scale,
        absent: list[bool],
        flat: Array | None = None,
    ) -> None:
        """One pass over a share (elements of a bucket, in which ``slots`` begin at ``offsets``) of what is not staged.

        See ``Direction``; ``flat`` begins with the share.
        """
        self._in_place.run(int(direction), slots, offsets, *share, op, scale, absent, flat)

    def _tell_and_wait(self, kind: int, number: int, mine: int, theirs: int) -> list[CellWait]:
        if self._withdrawn:  # this rank's own number, which it will never tell
            return [CellWait(self._cells, self._index(kind, self.me, number), mine, self._transport.rank)]
        self._cells.set(self._index(kind, self.me, number), mine)
        for wakeup in self._wakeups:
            wakeup.ring()
        return [
            CellWait(self._cells, self._index(kind, rank, number), theirs, member)
            for rank, member in enumerate(self.members)
            if rank != self.me
        ]

    def _index(self, kind: int, rank: int, number: int) -> int:
        return (kind * len(self.members) + rank) * CELLS + number % CELLS

    def give_back(self) -> None:
        """Nothing is under way: this rank's small gradients and chunks go back to the system until they are used."""
        self.window.give_back(self._region(self.me), self._region_bytes)
        self.staging.leave()

    def discard(self) -> None:
        """Give back all that was populated, before anybody has used it: some rank has no room for its part."""
        self.window.give_back(0, self._head_bytes + len(self.members) * self._region_bytes)


def _dtype_number(slot: Slot) -> int:
    return list(DTYPES).index(NAMES[slot.dtype])


def node_pass(
    group: Group, lane_id: int, slots: Sequence[Slot], holds_all: bool = False
) -> tuple[NodePass | None, str]:
    """Where a lane's gradients meet on this node, or why they cannot; both nothing with one rank of the group here."""
    staging = None if group.layout is None else group.layout.staging
    if staging is None:
        return None, ""
    from hvdkit.transports.node.transport import NodeTransport

    assert isinstance(group.transport, NodeTransport)
    here = None
    try:
        segment = lane_segment(lane_id)
        here = NodePass(group.transport, staging.members, segment, slots, staging.spin_seconds, holds_all)
        here.populate()
    except OSError as error:
        if here is not None:
            here.discard()
        return None, f"no room for {block_offsets(slots, holds_all)[1]} bytes on each rank ({error})"
    return here, ""
