"""Buckets in memory that the ranks of a node share: gradients are summed where they lie, in one pass.

Each rank writes its gradients into a region of its own that all of them map. When all have said that a bucket is ready,
each reduces its share of it out of all regions into all regions. Between nodes, that share goes to its counterparts.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdkit import kernels
from hvdkit.collectives.compressed import allreduce_encoded
from hvdkit.collectives.group import Array, Group, Steps
from hvdkit.collectives.hierarchical import Layout, counterparts, early_scale, node_bytes
from hvdkit.compression import Codec, LossyCodec, Memory
from hvdkit.engine.buckets import Buckets, Reduction
from hvdkit.engine.execution import effective
from hvdkit.engine.memories import Memories
from hvdkit.engine.plan import Bucket, Slot, total_bytes
from hvdkit.engine.schedule import Piece
from hvdkit.kernels import ReduceOp
from hvdkit.transports.base import CACHE_LINE
from hvdkit.transports.node import NodeTransport

# Counters of each rank, used in turn. A rank's operations in flight lie within half as many (lane.SPAN), so a counter
# is used again only when this rank is through with its last use, and others wait for no less than what it says.
CELLS = 64
PAGE = mmap.PAGESIZE


class CellWait:
    """A wait, like a transfer, until another rank's counter has reached a number."""

    __slots__ = ("_cells", "_index", "_number", "peer")

    def __init__(self, cells: Any, index: int, number: int, peer: int) -> None:
        self._cells, self._index, self._number = cells, index, number
        self.peer = peer

    def done(self) -> bool:
        return bool(self._cells.get(self._index) >= self._number)


class SharedBuckets(Buckets):
    """numpy arrays in the regions of one lane's window.

    A window holds, for each of the node's ranks, counters ("ready" and "done" for each operation under way), a region,
    and a spare region in which a rank that has joined offers zeros while its own gradients stay as they are.
    """

    on_device = False
    layout: Layout

    def __init__(self, group: Group, layout: Layout, reduction: Reduction, place: int, slots: Sequence[Slot]) -> None:
        transport = group.transport
        assert isinstance(transport, NodeTransport)
        assert layout.staging is not None
        self._group, self.layout, self._reduction = group, layout, reduction
        self._transport, self._place = transport, place
        self._members = layout.staging.members
        self._me = layout.staging.me
        self._bells = transport.bells_of([rank for rank in self._members if rank != transport.rank])
        self._head_bytes = -(-2 * len(self._members) * CELLS * CACHE_LINE // PAGE) * PAGE
        self._region_bytes = -(-total_bytes(slots) // PAGE) * PAGE + PAGE
        self.memories = Memories(slots, reduction.codecs, len(layout.nodes) > 1)
        self._buckets: list[Bucket] = []
        self._views: list[list[list[Array]]] = []  # by bucket, rank, and what it offers: its gradients or zeros
        self.told = (
            f"one pass over the memory of {len(self._members)} ranks"
            if len(layout.nodes) == 1
            else f"one pass on {len(layout.nodes)} nodes, {layout.carriers} ranks of each carry their shares between"
        )
        self._mapped_again = False
        self._map()

    def _region(self, number: int) -> tuple[int, int]:
        """Where a rank's region begins in the window, and its bytes; spare regions follow those of all ranks."""
        return self._head_bytes + number * self._region_bytes, self._region_bytes

    def _map(self) -> None:
        count = len(self._members)
        self._window: Any = self._transport.window(self._place, self._head_bytes + 2 * count * self._region_bytes)
        self._cells: Any = self._transport.cells(self._window, 0, 2 * count * CELLS)

    def populate(self) -> None:
        """Take memory for all ranks' regions now, this one's first. Raises OSError where there is not enough."""
        for step in range(len(self._members)):
            rank = (self._me + step) % len(self._members)
            self._transport.populate(self._window, self._place, *self._region(rank))

    def lay_out(self, buckets: Sequence[Bucket]) -> None:
        self._buckets = list(buckets)
        self.memories.lay_out(buckets)
        if self._window is not None:
            self._view()

    def buffers(self) -> list[Any]:
        return [views[self._me][0] for views in self._views]

    def _view(self) -> None:
        memory, count = np.frombuffer(self._window, dtype=np.uint8), len(self._members)
        self._views = []
        end = 0
        for bucket in self._buckets:
            begin, end = end, end + bucket.nbytes
            self._views.append([])
            for rank in range(count):
                starts = (self._region(rank)[0], self._region(count + rank)[0])
                self._views[-1].append([memory[start + begin : start + end].view(bucket.dtype) for start in starts])

    def mark(self) -> Any:
        return None

    def reduce(self, piece: Piece, joined: bool, marks: Sequence[Any], sequence: int, tag: int) -> Steps[None]:
        if self._window is None:  # closed; but this rank has joined, and others still need its share
            self._mapped_again = True
            self._map()
            self._view()
        # What the steps need is held by them: the lane may be closed while they are under way.
        memory = self.memories.of_piece(piece)
        return self._steps(piece, joined, self._cells, self._views[piece.bucket], memory, sequence, tag)

    def _steps(
        self,
        piece: Piece,
        joined: bool,
        cells: Any,
        regions: list[list[Array]],
        memory: Memory,
        sequence: int,
        tag: int,
    ) -> Steps[None]:
        reduction, group, count = self._reduction, self._group, len(self._members)
        op, scale = effective(reduction.op, reduction.postscale, group.size)
        own = regions[self._me][int(joined)][piece.begin : piece.end]
        if joined:
            own[...] = 0
        elif reduction.prescale != 1.0:
            kernels.scale_into(own, own, reduction.prescale)
        codec = self.memories.codec(piece.bucket)
        self.memories.prepare(piece, own)
        if isinstance(codec, LossyCodec) and codec.everywhere:
            yield from allreduce_encoded(group, own, op, scale, codec, tag, memory)
            return
        yield self._tell_and_wait(cells, 0, sequence, 2 * (sequence + 1) + int(joined), 2 * (sequence + 1))
        begin, end = self.memories.shares(piece, self.layout, count)[self._me]
        if begin < end:
            mine = slice(piece.begin + begin, piece.begin + end)
            offers = [cells.get(self._index(0, rank, sequence)) & 1 for rank in range(count)]
            views = [regions[rank][offer][mine] for rank, offer in enumerate(offers)]
            if len(self.layout.nodes) == 1:
                kernels.reduce_into(views, views, op, scale)
            else:
                yield from self._reduce_across(views, op, scale, codec, tag, memory.part(begin, end))
        yield self._tell_and_wait(cells, 1, sequence, sequence + 1, sequence + 1)
        group.bytes_sent += node_bytes(own.nbytes, count)

    def _reduce_across(
        self, views: list[Array], op: ReduceOp, scale: float, codec: Codec, tag: int, memory: Memory
    ) -> Steps[None]:
        """This rank's share: the node's sum into its own region, the sum of nodes, and one pass back."""
        across = counterparts(self._group, self.layout)
        assert across is not None
        own = views[self._me]
        node_scale, wire_scale = early_scale(own, op, scale, codec)
        kernels.reduce_into(own, views, op, node_scale)
        yield from allreduce_encoded(across, own, op, wire_scale, codec, tag, memory)
        self._group.bytes_sent += across.bytes_sent
        others = [view for rank, view in enumerate(views) if rank != self._me]
        kernels.reduce_into(others, [own], ReduceOp.SUM, 1.0)

    def _tell_and_wait(self, cells: Any, kind: int, sequence: int, mine: int, theirs: int) -> list[Any]:
        cells.set(self._index(kind, self._me, sequence), mine)
        for bell in self._bells:
            bell.ring()
        return [
            CellWait(cells, self._index(kind, rank, sequence), theirs, member)
            for rank, member in enumerate(self._members)
            if rank != self._me
        ]

    def _index(self, kind: int, rank: int, sequence: int) -> int:
        return (kind * len(self._members) + rank) * CELLS + sequence % CELLS

    def forget(self, quiet: bool) -> None:
        """The memory goes when the last gradient that lies there goes.

        It goes back to the system only if nothing was in flight: a slow rank might still read it and take zeros for
        gradients.
        """
        if quiet and self._window is not None:
            # Mapped again, it is used for zeros only, while gradients may still live in the first mapping.
            number = len(self._members) + self._me if self._mapped_again else self._me
            self._window.give_back_at_end(*self._region(number))
        self._views, self._window, self._cells = [], None, None
        self.memories.forget()

    def discard(self) -> None:
        """Give back all memory, before anybody has used it: some rank has no room for its part."""
        self._window.give_back_at_end(0, self._head_bytes + 2 * len(self._members) * self._region_bytes)
        self.forget(quiet=False)

    def close(self) -> None:
        self.forget(quiet=False)
