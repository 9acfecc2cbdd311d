"""A lane's gradients on one node: each rank reduces its share of everyone's in one pass, or in chunks of shared memory.

A window of the node's memory has counters ("ready" and "done" for each operation under way), when each rank was ready,
a table in which each rank writes where it has each gradient, a region of each rank for its small gradients, and slots
for chunks of gradients that others cannot reach where they lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from hvdkit.collectives.group import Array, Group, Steps, partition
from hvdkit.collectives.staging import Mode, Staging, Turn, staging_bytes
from hvdkit.engine.ranks.assignments import SPAN
from hvdkit.engine.ranks.groups import lane_segment
from hvdkit.engine.steps.offers import Block, Part, block_offsets, pages
from hvdkit.engine.steps.plan import Slot
from hvdkit.kernels import DTYPES, NAMES, ReduceOp, Scale
from hvdkit.transports.base import CACHE_LINE, Transfer

if TYPE_CHECKING:
    from hvdkit.transports.node.transport import NodeTransport

# Counters of each rank, used in turn. A rank's operations in flight lie within half as many, so a counter is used again
# only when this rank is through with its last use, and others wait for no less than what it says.
CELLS = 2 * SPAN


class Where(IntEnum):
    """The place of a rank's gradient; the numbers are those of transports/csrc/in_place.h."""

    ELSEWHERE = 0
    ARENA = 1
    REGION = 2
    ZEROS = 3


class Direction(IntEnum):
    """The direction between the gradients of all ranks and one flat array; the numbers are those of csrc/in_place.h."""

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


class NodePass:
    """The window of a lane, for the ranks of ``staging``. ``holds_all``: large gradients have a place there too."""

    def __init__(
        self, transport: NodeTransport, segment: int, slots: Sequence[Slot], staging: Staging, holds_all: bool
    ) -> None:
        from hvdkit.kernels._native import Cells, InPlace

        self.members = list(staging.members)
        self.under_way: set[int] = set()  # operations that this rank is ready for and not through with
        self._withdrawn = False
        self.me = self.members.index(transport.rank)
        self._transport, self._segment = transport, segment
        self._others = [(place, rank) for place, rank in enumerate(self.members) if rank != transport.rank]
        self._wakeups = transport.wakeups_of([rank for _, rank in self._others])
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
                (list(DTYPES).index(NAMES[slot.dtype]), slot.elements, offset)
                for slot, offset in zip(slots, offsets, strict=True)
            ],
            [self._region(rank) for rank in range(count)],
            self._region_bytes,
            transport.arenas_of(self.members),
        )  # fmt: skip
        wakeups = transport.wakeups_of(self.members)
        self.staging = Staging(self.members, transport.rank, self.window, staging_begin, wakeups, staging.spin_seconds)
        # offer(slot, where, offset): this rank's gradient of a large slot lies there, at an offset of its arena.
        self.offer = self._in_place.offer
        window: Array = np.frombuffer(memoryview(self.window), dtype=np.uint8)
        self._ready_at: Array = window[cells_bytes:table_begin].view(np.float64).reshape(count, CELLS)
        region = self._region(self.me)
        self.block = Block(window[region : region + self._region_bytes], slots, offsets)
        for slot in self.block.places:
            self._in_place.offer(slot, Where.REGION)

    def _region(self, rank: int) -> int:
        return self._head_bytes + rank * self._region_bytes

    def populate(self) -> None:
        """Populate the memory for all ranks' small gradients, this rank's first. Raises OSError if it is short."""
        populate, count = self._transport.memory.populate, len(self.members)
        populate(self.window, self._segment, 0, self._head_bytes)
        for step in range(count if self._region_bytes else 0):
            populate(self.window, self._segment, self._region((self.me + step) % count), self._region_bytes)

    def ready(self, number: int, absent: bool) -> list[Transfer]:
        """Announce that this rank's gradients of an operation are where the table has them, or that it has none."""
        self.under_way.add(number)
        self._ready_at[self.me, number % CELLS] = perf_counter()  # one clock for the processes of a host
        return self._tell_and_wait(number % CELLS, 2 * (number + 1) + int(absent), 2 * (number + 1))

    def ready_at(self, number: int) -> dict[int, float]:
        """Return the time (perf_counter) at which each rank of the node was ready for an operation, once all are."""
        return dict(zip(self.members, self._ready_at[:, number % CELLS].tolist(), strict=True))

    def done(self, number: int) -> list[Transfer]:
        """Announce that this rank is through with all ranks' gradients of an operation, ``under_way`` until all are."""
        return self._tell_and_wait(len(self.members) * CELLS + number % CELLS, number + 1, number + 1)

    def withdraw(self) -> None:
        """Take back that this rank is ready, before its gradients move away from the places in the table.

        A rank that reads there afterwards notices it by ``withdrawn`` before it passes its sums on. From now on this
        rank announces nothing.
        """
        self._withdrawn = True
        for number in list(self.under_way):
            self._cells.set(self.me * CELLS + number % CELLS, 0)

    def withdrawn(self, number: int) -> list[Transfer]:
        """Return endless waits if a rank has withdrawn, since sums may be wrong then: the failure is on its way."""
        cells, index, wanted = self._cells, number % CELLS, 2 * (number + 1)
        for rank in range(len(self.members)):
            if cells.get(rank * CELLS + index) < wanted:
                return [
                    CellWait(cells, rank * CELLS + index, wanted, member) for rank, member in enumerate(self.members)
                ]
        return []

    def resolve(self, number: int, slots: Sequence[int]) -> tuple[list[bool], list[int]]:
        """Return for each rank if it contributes zeros, and the slots that some rank has out of the others' reach."""
        cell = number % CELLS
        absent = [bool(self._cells.get(rank * CELLS + cell) & 1) for rank in range(len(self.members))]
        return absent, self._in_place.staged(slots, absent)

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
        """Reduce a share of a bucket, with which ``flat`` begins, in one pass; staged slots are left out."""
        self._in_place.run(int(direction), slots, offsets, *share, op, scale, absent, flat)

    def _tell_and_wait(self, first: int, own: int, wanted: int) -> list[Transfer]:
        """Set this rank's counter to ``own``; return waits until the others' are ``wanted``. ``first``: rank 0's."""
        cells, me = self._cells, self.me
        if self._withdrawn:  # this rank's own number, which it will never tell
            return [CellWait(cells, first + me * CELLS, own, self._transport.rank)]
        cells.set(first + me * CELLS, own)
        for wakeup in self._wakeups:
            wakeup.ring()
        waits: list[Transfer] = []
        for place, rank in self._others:
            if cells.get(first + place * CELLS) < wanted:
                waits.append(CellWait(cells, first + place * CELLS, wanted, rank))
        return waits

    def give_back(self) -> None:
        """Give this rank's small gradients and chunks back to the system until they are used."""
        self.window.give_back(self._region(self.me), self._region_bytes)
        self.staging.leave()

    def discard(self) -> None:
        """Give back all populated memory before its first use, because some rank has no room for its part."""
        self.window.give_back(0, self._head_bytes + len(self.members) * self._region_bytes)


class Order:
    """An order in which operations pass by their numbers."""

    def __init__(self) -> None:
        self.passed = 0  # all operations with lower numbers are through
        self._left: set[int] = set()

    def leave(self, number: int) -> None:
        """Note that this operation has passed, or need not pass."""
        if number == self.passed and not self._left:
            self.passed += 1
            return
        self._left.add(number)
        while self.passed in self._left:
            self._left.remove(self.passed)
            self.passed += 1


class Share(NamedTuple):
    """Between nodes: each rank's share of a piece, this rank's as a flat array, and where that begins in the piece."""

    of_ranks: Sequence[tuple[int, int]]
    flat: Array
    begin: int


class Chunks:
    """Shared memory of a lane, in two halves, for chunks of gradients that others cannot reach where they lie."""

    def __init__(self, node: NodePass, rank: int, slots: Sequence[Slot]) -> None:
        self._node, self._rank, self._slots = node, rank, slots
        self._orders = Order(), Order()  # one for each half of the memory for chunks

    def leave(self, number: int, *halves: int) -> None:
        """Note that an operation does not use these halves, or no longer."""
        for half in halves:
            self._orders[half].leave(number)

    def run(
        self,
        half: int,
        mode: Mode,
        number: int,
        parts: Sequence[Part],
        op: ReduceOp,
        scale: Scale,
        share: Share | None = None,
    ) -> Steps[None]:
        """Reduce parts of an operation in a half, in the order of operations, and leave it."""
        node, order = self._node, self._orders[half]
        if parts and order.passed != number:
            yield [Turn(order, number, self._rank)]
        for part in parts:
            array, source = part.array(), part.source()
            if array is None:
                array = np.zeros(part.elements, self._slots[part.slot].dtype)
            if share is None:
                runs = partition(part.elements, len(node.members), array.itemsize)
            else:
                runs = [part.within(each) for each in share.of_ranks]
            own = slice(*runs[node.me])
            flat = None
            if share is not None and array[own].size:
                begin = part.begin - share.begin
                flat = share.flat[begin + own.start : begin + own.stop]
            if mode is Mode.ALLGATHER:
                source = None
                if flat is not None:
                    array[own] = flat
            ticket = node.staging.queues[half].draw()
            yield from node.staging.run(half, ticket, mode, array, runs, op, scale, source)
            if mode is Mode.REDUCE_SCATTER and flat is not None:
                flat[...] = array[own]
        order.leave(number)


def node_pass(
    group: Group, lane_id: int, slots: Sequence[Slot], holds_all: bool = False
) -> tuple[NodePass | None, str]:
    """Return the window of a lane on this node, or the reason against it; neither with one rank of the group here."""
    staging = None if group.layout is None else group.layout.staging
    if staging is None:
        return None, ""
    here, transport = None, cast("NodeTransport", group.transport)
    try:
        segment = lane_segment(lane_id)
        here = NodePass(transport, segment, slots, staging, holds_all)
        here.populate()
    except OSError as error:
        if here is not None:
            here.discard()
        return None, f"no room for {block_offsets(slots, holds_all)[1]} bytes on each rank ({error})"
    return here, ""
