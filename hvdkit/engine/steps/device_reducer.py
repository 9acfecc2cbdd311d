"""Gradients in the memory of a device: reduced there by its own collectives, or copied to the host and back."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, cast

from hvdkit.collectives.group import Array, Group, Steps, two_phase_bytes
from hvdkit.collectives.hierarchical import Layout
from hvdkit.compression import Codec, CodecState, LossyCodec
from hvdkit.compression.state import TURN
from hvdkit.engine.steps.host_reducer import HostReducer
from hvdkit.engine.steps.node_pass import NodePass
from hvdkit.engine.steps.offers import FILLED, Offer, with_offers
from hvdkit.engine.steps.plan import Arrangement, Reduction, Slot
from hvdkit.engine.steps.reducer import OnBegin, Reducer
from hvdkit.engine.steps.residuals import Checkpoint
from hvdkit.engine.steps.schedule import Piece, Sizes, for_a_device
from hvdkit.engine.telemetry.compression_report import Report
from hvdkit.kernels import ReduceOp
from hvdkit.transports.base import Transfer

if TYPE_CHECKING:
    from hvdkit.transports.gpu.device import DeviceCollectives
    from hvdkit.transports.gpu.streams import HostCopies, Pairs

Parts = Sequence[tuple[int, Any]]  # where each begins in a bucket, and a flat tensor


def stays_on_device(
    codecs: Sequence[Codec], nodes: Sequence[Sequence[int]], members: Sequence[int], encodes: bool = True
) -> bool:
    """True if all codecs of a plan of these ranks can work on the device; the answer is the same on all of them.

    On one node nothing is encoded, except by codecs that encode everywhere. Between nodes gradients are encoded on the
    device if each node has one rank; sums of nodes with several ranks are encoded in host memory. ``encodes``: the
    device can encode at all.
    """
    nodes_here = count_nodes(nodes, members)
    return all(
        encodes and codec.on_device and (codec.everywhere or nodes_here == len(members))
        for codec in codecs
        if codec.encodes and (codec.everywhere or nodes_here > 1)
    )


def count_nodes(nodes: Sequence[Sequence[int]], members: Sequence[int]) -> int:
    """Return the number of nodes that have one of these ranks."""
    return sum(not set(node).isdisjoint(members) for node in nodes)


class DeviceReducer(Reducer):
    """Tensors of a device, reduced by the device's own collectives."""

    on_device = True
    is_written_late = True

    def __init__(
        self,
        group: Group,
        reduction: Reduction,
        collectives: DeviceCollectives,
        slots: Sequence[Slot],
        nodes: Sequence[Sequence[int]],
    ) -> None:
        super().__init__(group, reduction, slots, False if count_nodes(nodes, group.members) == 1 else None)
        self._kept: list[Any] = []  # by bucket: what its codec keeps on the device
        self._pulled: set[int] = set()  # buckets of which the host holds the same
        self._changed: set[int] = set()  # of which the host holds what the device shall keep
        self._collectives = collectives
        self._offers: list[Offer | None] = [None] * len(slots)
        self.reason = "the device's collectives"

    def sizes(self, usual: Sizes) -> Sizes:
        return for_a_device(usual)

    def lay_out(self, arrangement: Arrangement) -> None:
        self._pull()
        self.arrangement = arrangement
        self.residuals.lay_out(arrangement.buckets)
        self._remember()
        self._push()

    def _remember(self) -> None:
        buckets, residuals = self.arrangement.buckets, self.residuals
        self._pulled, self._changed = set(range(len(buckets))), set()
        self._kept = [
            self._collectives.memory(bucket.elements, list(residuals.of_bucket(i).arrays), residuals.gaps(i))
            for i, bucket in enumerate(buckets)
        ]

    # Between two steps the host's states are brought up to date when they are read or changed. Changed states go to the
    # device with the next gradient.

    def _pull(self) -> None:
        for bucket in set(range(len(self._kept))) - self._pulled:
            self._pulled.add(bucket)
            self._kept[bucket].pull(self.residuals.of_bucket(bucket))
            if self.residuals.is_in_use:  # what was copied may be half of an operation that has begun meanwhile
                self._pulled.discard(bucket)

    def _push(self) -> None:
        self._pulled, self._changed = set(range(len(self._kept))), set(range(len(self._kept)))

    def reports(self) -> list[Report]:
        if not self.residuals.is_in_use:  # else as it was read last
            self._pull()
        return super().reports()

    def residual_norm(self, piece: Piece) -> float | None:
        return None  # to read it, the host would have to wait for the device

    def reset(self) -> None:
        super().reset()
        self._push()

    def checkpoint(self, keys: Sequence[Hashable]) -> Checkpoint:
        self._pull()
        return super().checkpoint(keys)

    def go_on_from(self, saved: Checkpoint, keys: Sequence[Hashable]) -> None:
        self._pull()
        super().go_on_from(saved, keys)
        self._push()

    def offer(self, slots: Sequence[int], offers: Sequence[Any]) -> None:
        for slot, offer in zip(slots, offers, strict=True):
            self._offers[slot] = offer

    def end_step(self) -> None:
        super().end_step()
        self._offers = [None] * len(self._slots)

    def rescue(self) -> None:
        """Do nothing: work in flight is the device's own, which ends with the communicator."""

    def mark(self) -> Any:
        while self._changed:
            bucket = self._changed.pop()
            self._kept[bucket].push(self.residuals.of_bucket(bucket))
        return self._collectives.mark()

    def reduce(self, piece: Piece, joined: bool, marks: Sequence[Any], tag: int, on_begin: OnBegin) -> Steps[None]:
        if on_begin is not None:
            on_begin(None)
        number, bucket = piece.bucket, self.arrangement.buckets[piece.bucket]
        offers = [None if joined else self._offers[slot] for slot in bucket.slots]
        tensors = [  # flat tensors of the slots; zeros for a slot without a gradient
            self._collectives.allocate(self._slots[slot].elements, str(bucket.dtype)) if offer is None else offer.array
            for slot, offer in zip(bucket.slots, offers, strict=True)
        ]
        parts = list(zip(bucket.offsets, tensors, strict=True))
        paying = self.residuals.owes(number)
        debtors = [part for part, offer in zip(parts, offers, strict=True) if paying and offer is not None]
        memory = self.residuals.of_piece(piece)
        encodes = self.residuals.encodes(number)
        marks = list(marks)
        buffer = self._collectives.allocate(bucket.elements, str(bucket.dtype)) if encodes else None
        if encodes or None in offers:
            marks.append(self.mark())
        if debtors or encodes:
            self._pulled.discard(number)
        if encodes:
            return self._encoded_steps(number, buffer, parts, debtors, memory, marks)
        return self._steps(number, tensors, debtors, memory, marks)

    def _encoded_steps(
        self, bucket: int, buffer: Any, parts: Parts, debtors: Parts, memory: CodecState, marks: Sequence[Any]
    ) -> Steps[None]:
        size, (op, scale) = self._group.size, self._effective
        codec = cast("LossyCodec", self.residuals.codec(bucket))
        assert op == ReduceOp.SUM, op
        memory.turn = int(memory.recall(TURN) or memory.turn)
        way, _ = codec.way(memory.elements, size)
        # An estimate, as on the host; sums count as sums of a ring.
        sent = (size - 1 if way == "gather" else 2 * (size - 1) / size) * codec.sent_bytes(memory.elements, memory)
        memory.tally.bytes_before += two_phase_bytes(buffer.nbytes, size)
        memory.tally.bytes_after += sent
        kept, prescale = self._kept[bucket], self._reduction.prescale
        transfer = self._collectives.allreduce_encoded(
            buffer, parts, prescale, scale, codec, way, kept, memory.matrices(), memory.turn, marks, debtors
        )
        memory.keep(TURN, memory.turn + 1)
        self._group.bytes_sent += int(sent)
        yield [transfer]
        self._forget_paid(bucket)

    def _steps(
        self, bucket: int, tensors: Sequence[Any], debtors: Parts, memory: CodecState, marks: Sequence[Any]
    ) -> Steps[None]:
        (op, scale), prescale = self._effective, self._reduction.prescale
        codec, kept = self.residuals.codec(bucket), self._kept[bucket]
        cast_name = "none" if codec.encodes else codec.name
        transfer = self._collectives.allreduce(tensors, op, prescale, scale, cast_name, marks, kept, debtors)
        nbytes, dtype = sum(tensor.nbytes for tensor in tensors), self.arrangement.buckets[bucket].dtype
        sent = two_phase_bytes(nbytes, self._group.size)  # as a ring sends, whatever the library does
        if not codec.encodes and codec.wire_itemsize(dtype) < dtype.itemsize:
            memory.tally.bytes_before += sent
            sent = sent * codec.wire_itemsize(dtype) // dtype.itemsize
            memory.tally.bytes_after += sent
        self._group.bytes_sent += sent
        yield [transfer]
        self._forget_paid(bucket)

    def _forget_paid(self, bucket: int) -> None:
        if self.residuals.owes(bucket):
            self._kept[bucket].forget_paid(self.residuals.of_bucket(bucket))

    def forget(self, quiet: bool) -> None:
        self.end_step()
        self.residuals.forget()
        self._remember()

    def close(self) -> None:
        self._collectives.close()


class CopiedReducer(HostReducer):
    """A HostReducer for gradients on a device without collectives: all slots have a place in the lane's block.

    Ranks share a GPU, use MPI, or encode on the host only. When a bucket is complete, its pieces are copied into the
    block. A reduced piece is copied back, and is over when the host has seen that copy end. ``opener`` opens copies.
    """

    on_device = True

    def __init__(
        self,
        group: Group,
        reduction: Reduction,
        layout: Layout | None,
        slots: Sequence[Slot],
        node: NodePass | None,
        opener: Callable[[Array], HostCopies],
    ) -> None:
        super().__init__(group, reduction, layout, slots, node, holds_all=True)
        self._copies = opener(self.block.memory)
        self._gradients: list[Offer | None] = [None] * len(slots)
        self.is_written_late = True
        self.reason = f"copied from the device and back; {self.reason}"

    def small(self, slot: int) -> Any:
        return None

    def offer(self, slots: Sequence[int], offers: Sequence[Any]) -> None:
        for slot, offer in zip(slots, offers, strict=True):
            self._gradients[slot] = offer
        super().offer(slots, [None if offer is None else FILLED for offer in offers])

    def mark(self) -> Any:
        return self._copies.mark()

    def reduce(self, piece: Piece, joined: bool, marks: Sequence[Any], tag: int, on_begin: OnBegin) -> Steps[None]:
        gradients, bucket = None if joined else self._gradients, self.arrangement.buckets[piece.bucket]
        layout = self._layouts.get(piece) or self._layout_of(piece, bucket)
        pairs = [
            (self.block.places[part.slot][part.first : part.first + part.elements], part.array())
            for part in with_offers(layout.runs, gradients)
            if part.offer is not None
        ]
        arrives = self._copies.to_host(pairs, marks) if pairs else None
        return self._copied(pairs, arrives, super().reduce(piece, joined, (), tag, on_begin))

    def _copied(self, pairs: Pairs, arrives: Transfer | None, steps: Steps[None]) -> Steps[None]:
        if arrives is not None:
            yield [arrives]
        yield from steps
        if pairs:
            yield [self._copies.to_device(pairs)]

    def end_step(self) -> None:
        self._gradients = [None] * len(self._gradients)
        super().end_step()

    def forget(self, quiet: bool) -> None:
        if quiet:
            self._copies.close()
        super().forget(quiet)

    def close(self) -> None:
        self._copies.close()
        super().close()
