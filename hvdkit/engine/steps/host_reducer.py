"""Gradients in host memory: summed where they lie on each node, and between nodes as flat shares."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from hvdkit import kernels
from hvdkit.arena import ARENA
from hvdkit.collectives.compressed import allreduce_encoded
from hvdkit.collectives.group import Array, Group, Steps, two_phase_bytes
from hvdkit.collectives.hierarchical import Layout, allreduce_share, layout_allreduce, split_scale
from hvdkit.collectives.scratch import SCRATCH
from hvdkit.collectives.staging import Mode
from hvdkit.compression import Codec, CodecState
from hvdkit.engine.steps.node_pass import Chunks, Direction, NodePass, Share, Where
from hvdkit.engine.steps.offers import FILLED, Offer, Part, offer_of, private_block, runs_in, with_offers
from hvdkit.engine.steps.plan import Arrangement, Bucket, Reduction, Slot
from hvdkit.engine.steps.reducer import OnBegin, Reducer
from hvdkit.engine.steps.schedule import Piece
from hvdkit.kernels import ONE, ReduceOp, Scale

logger = logging.getLogger("hvdkit")


class PieceWork(NamedTuple):
    """The reduction of one piece; ``number`` counts operations, alike on all ranks of the node."""

    piece: Piece
    bucket: Bucket
    codec: Codec
    state: CodecState
    number: int
    tag: int


class PieceLayout(NamedTuple):
    """The runs of slots in a piece."""

    runs: list[Part]  # parts of zeros
    slots: list[int]
    shares: Sequence[tuple[int, int]]  # the elements that each rank of the node carries between nodes
    sent_bytes: int  # that count as sent on the node


NOTHING_KEPT = CodecState(0)  # of codecs without loss


class HostReducer(Reducer):
    """The reduction in host memory: through ``node``, where ranks of this node reach each other's gradients, if any.

    ``layout``: how ranks lie on nodes, where some of them share memory. ``holds_all``: large gradients are copied into
    the block too. A gradient in the arena is pinned from its offer until all ranks are through with it.
    """

    on_device = False

    def __init__(
        self,
        group: Group,
        reduction: Reduction,
        layout: Layout | None,
        slots: Sequence[Slot],
        node: NodePass | None = None,
        takes_turns: bool = False,
        holds_all: bool = False,
    ) -> None:
        super().__init__(group, reduction, slots, None if layout is None else len(layout.nodes) > 1)
        self.layout, self._node = layout, node
        self._layouts: dict[Piece, PieceLayout] = {}  # of these buckets
        self.block = node.block if node is not None else private_block(slots, holds_all)
        self._nbytes = [slot.nbytes for slot in slots]
        self._offers: list[Offer | None] = [None] * len(self._slots)
        self._pinned: list[int] = []
        self._is_elastic = group.transport.is_elastic
        self.is_written_late = node is None
        self.takes_turns = takes_turns
        # Not by this rank's own node, which may be the only one with one rank: all ranks must cut alike.
        self.copies_buckets = layout is None
        self._number = 0  # of the next operation, the same on all ranks
        self._chunks = None if node is None else Chunks(node, group.members[group.rank], self._slots)
        if layout is None or node is None:
            self.reason = "no shared memory" if layout is None else "over nodes"
        elif len(layout.nodes) == 1:
            self.reason = f"one pass over the memory of {len(node.members)} ranks"
        else:
            carriers = f"{layout.carriers} ranks of each carry their shares between"
            self.reason = f"one pass on {len(layout.nodes)} nodes, {carriers}"

    def lay_out(self, arrangement: Arrangement) -> None:
        self.arrangement = arrangement
        self._layouts = {}
        self.residuals.lay_out(arrangement.buckets)

    def small(self, slot: int) -> Array | None:
        return self.block.places.get(slot)

    def offer(self, slots: Sequence[int], offers: Sequence[Any]) -> None:
        places, tell_node = self.block.offers, None if self._node is None else self._node.offer
        for slot, offer in zip(slots, offers, strict=True):
            place = places.get(slot)
            if place is not None:
                if offer is None:
                    place.array[...] = 0
                self._offers[slot] = place
                continue
            assert offer is not FILLED, f"{self._slots[slot].name!r} is no small slot"
            self._offers[slot] = offer
            where, offset = Where.ZEROS if offer is None else Where.ELSEWHERE, -1
            if offer is not None and offer.source is None:
                offset = ARENA.pin(offer.address, self._nbytes[slot])
            if offset >= 0:
                self._pinned.append(offset)
                where = Where.ARENA
            if tell_node is not None:
                tell_node(slot, where, max(offset, 0))

    def end_step(self) -> None:
        self.residuals.is_in_use = False
        self._offers = [None] * len(self._slots)
        if self._pinned:
            ARENA.unpin(self._take_pinned())
        ARENA.end_step()

    def _take_pinned(self) -> list[int]:
        """Return all pinned offsets, each once: several threads may end a step that fails."""
        taken = []
        with suppress(IndexError):
            while True:
                taken.append(self._pinned.pop())
        return taken

    def rescue(self) -> None:
        pinned = self._take_pinned()
        if self._node is not None:
            self._node.withdraw()
        if self._node is None and not self._is_elastic:
            return  # pinned for ever: a late message may still be received there
        try:
            ARENA.unpin_failed(pinned, self._is_elastic)
        except OSError as error:
            self.is_written_late = True  # and pinned for ever
            logger.warning("gradients of a failed step are copied, since they cannot be moved: %s", error)

    def reduce(self, piece: Piece, joined: bool, marks: Sequence[Any], tag: int, on_begin: OnBegin) -> Steps[None]:
        number, self._number = self._number, self._number + 1
        bucket = self.arrangement.buckets[piece.bucket]
        offers = None if joined else self._offers  # end_step() makes a new list, so these stay
        codec = self._reduction.codecs[bucket.codec]
        state = self.residuals.of_piece(piece) if codec.lossy or codec.encodes else NOTHING_KEPT
        self.residuals.is_in_use = True
        return self._steps(PieceWork(piece, bucket, codec, state, number, tag), offers, joined, on_begin)

    def _steps(
        self, work: PieceWork, offers: Sequence[Offer | None] | None, joined: bool, on_begin: OnBegin
    ) -> Steps[None]:
        piece, bucket, codec, _, number, _ = work
        node, chunks, (op, scale) = self._node, self._chunks, self._effective
        layout = self._layouts.get(piece) or self._layout_of(piece, bucket)
        runs = layout.runs
        is_flat = node is None or codec.everywhere
        prepares = self._reduction.prescale != 1.0 or self.residuals.owes(piece.bucket)
        # Gradients that other ranks reach where they lie need no parts; each part costs the garbage collector time.
        parts = with_offers(runs, offers) if is_flat or prepares else []
        if prepares:
            self._prepare(piece, parts)
        if node is None or chunks is None or is_flat:
            if chunks is not None:
                chunks.leave(number, 0, 1)
            if on_begin is not None:
                on_begin(None)
            yield from self._reduce_flat(work, parts)
            return
        yield node.ready(number, joined)
        if on_begin is not None:
            on_begin(partial(node.ready_at, number))
        absent, in_chunks_only = node.resolve(number, layout.slots)
        in_chunks: list[Part] = []
        if in_chunks_only:
            staged = set(in_chunks_only)
            parts = parts if prepares else with_offers(runs, offers)
            in_chunks = [part for part in parts if part.slot in staged]
        assert self.layout is not None
        if len(self.layout.nodes) == 1:
            begin, end = layout.shares[node.me]
            share = piece.begin + begin, piece.begin + end
            node.run(Direction.ALL, bucket.slots, bucket.offsets, share, op, scale, absent)
            if waits := node.withdrawn(number):
                yield waits
            if in_chunks:
                yield from chunks.run(0, Mode.ALLREDUCE, number, in_chunks, op, scale)
                chunks.leave(number, 1)
            else:
                chunks.leave(number, 0, 1)
        else:
            yield from self._reduce_across(node, chunks, work, in_chunks, layout.shares, absent)
        yield node.done(number)
        node.under_way.discard(number)
        self._group.bytes_sent += layout.sent_bytes

    def _layout_of(self, piece: Piece, bucket: Bucket) -> PieceLayout:
        runs, node, sent_bytes = runs_in(piece, bucket, self._slots), self._node, 0
        shares: Sequence[tuple[int, int]] = ()
        if node is not None and self.layout is not None:
            shares = self.residuals.shares(piece, self.layout, len(node.members))
            sent_bytes = two_phase_bytes((piece.end - piece.begin) * bucket.dtype.itemsize, len(node.members))
        layout = self._layouts[piece] = PieceLayout(runs, [run.slot for run in runs], shares, sent_bytes)
        return layout

    def _prepare(self, piece: Piece, parts: list[Part]) -> None:
        """Scale this rank's gradients and add owed residuals, before any rank sums them."""
        prescale = self._reduction.prescale
        gradients = []
        for number, part in enumerate(parts):
            array, source = part.array(), part.source()
            if array is None:
                continue
            if source is not None:
                array[...] = source
                parts[number] = part._replace(offer=offer_of(part.offer.array))  # type: ignore[union-attr]
            if prescale != 1.0:
                kernels.scale_into(array, array, Scale(prescale))
            gradients.append((part.begin, array))
        self.residuals.pay(piece, gradients)

    def _reduce_flat(self, work: PieceWork, parts: Sequence[Part]) -> Steps[None]:
        """Reduce a piece as one flat array: a tensor's own memory if the piece is all of that, else a copy."""
        piece, bucket, codec, state, _, tag = work
        op, scale = self._effective
        elements = piece.end - piece.begin
        own = parts[0].array() if len(parts) == 1 and parts[0].elements == elements else None
        scratch = SCRATCH.take(0 if own is not None else elements * bucket.dtype.itemsize)
        flat = own if own is not None else scratch[: elements * bucket.dtype.itemsize].view(bucket.dtype)
        for part in parts:
            if own is None or part.source() is not None:
                part.take(flat[part.begin : part.begin + part.elements])
        self.residuals.clear_gaps(piece, flat)
        layout = self.layout
        if layout is None or codec.everywhere:
            yield from allreduce_encoded(self._group, flat, op, scale, codec, tag, state)
        else:  # this node has one rank of the group
            shares = self.residuals.shares(piece, layout, 1)
            yield from layout_allreduce(self._group, layout, flat, op, scale, codec, tag, (0, 0), None, state, shares)
        for part in parts:
            array = part.array()
            if own is None and array is not None:
                array[...] = flat[part.begin : part.begin + part.elements]
        SCRATCH.give_back(scratch)

    def _reduce_across(
        self,
        node: NodePass,
        chunks: Chunks,
        work: PieceWork,
        in_chunks: Sequence[Part],
        shares: Sequence[tuple[int, int]],
        absent: list[bool],
    ) -> Steps[None]:
        """Sum a piece over nodes: this rank's share of it in one flat array."""
        assert self.layout is not None
        piece, bucket, codec, state, number, tag = work
        op, scale = self._effective
        begin, end = shares[node.me]
        nbytes = (end - begin) * bucket.dtype.itemsize
        scratch = SCRATCH.take(nbytes)
        flat = scratch[:nbytes].view(bucket.dtype)
        node_scale, wire_scale = split_scale(flat, op, scale, codec)
        share = piece.begin + begin, piece.begin + end
        carried = Share(shares, flat, begin)

        def gather() -> Steps[None]:
            node.run(Direction.GATHER, bucket.slots, bucket.offsets, share, op, node_scale, absent, flat)
            if waits := node.withdrawn(number):
                yield waits
            yield from chunks.run(0, Mode.REDUCE_SCATTER, number, in_chunks, op, node_scale, carried)
            self.residuals.clear_gaps(Piece(piece.bucket, *share, 0, 1), flat)

        def spread() -> Steps[None]:
            node.run(Direction.SPREAD, bucket.slots, bucket.offsets, share, ReduceOp.SUM, ONE, absent, flat)
            yield from chunks.run(1, Mode.ALLGATHER, number, in_chunks, op, ONE, carried)

        part = state.part(begin, end)
        yield from allreduce_share(self._group, self.layout, flat, gather(), spread(), op, wire_scale, codec, tag, part)
        SCRATCH.give_back(scratch)

    def forget(self, quiet: bool) -> None:
        self._offers = []  # which keep gradients
        self.block.leave()
        if self._node is not None and quiet:
            self._node.give_back()
        self.residuals.forget()
        if not self._is_elastic:  # the next generation has the same gradients
            ARENA.trim()

    def close(self) -> None:
        self.block.leave()
        self._node = self._chunks = None
