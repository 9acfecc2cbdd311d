"""Gradients in the memory of a device, reduced there in place, or encoded, by the device's own collectives."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, cast

from hvdkit.collectives.group import Group, Steps, two_phase_bytes
from hvdkit.compression import Codec, CodecState, LossyCodec
from hvdkit.compression.state import TURN
from hvdkit.engine.ops import effective
from hvdkit.engine.steps.arrangement import Arrangement
from hvdkit.engine.steps.offers import Offer
from hvdkit.engine.steps.plan import Reduction, Slot
from hvdkit.engine.steps.reducer import OnBegin, Reducer
from hvdkit.engine.steps.residuals import Checkpoint, Residuals
from hvdkit.engine.steps.schedule import Piece, Sizes, for_a_device
from hvdkit.engine.telemetry.compression_report import Report
from hvdkit.kernels import ReduceOp
from hvdkit.transports.base import DeviceCollectives

Parts = Sequence[tuple[int, Any]]  # where each begins in a bucket, and a flat tensor


def stays_on_device(
    codecs: Sequence[Codec], nodes: Sequence[Sequence[int]], members: Sequence[int], encodes: bool = True
) -> bool:
    """True if all codecs of a plan of these ranks can work on the device; the answer is the same on all of them.

    On one node nothing is encoded, except by codecs that encode everywhere. Between nodes gradients are encoded on the
    device if each node has one rank; sums of nodes with several ranks are encoded in host memory. ``encodes``: the
    device can encode at all.
    """
    nodes_here = _by_node(nodes, members)
    return all(
        encodes and codec.on_device and (codec.everywhere or len(nodes_here) == len(members))
        for codec in codecs
        if codec.encodes and (codec.everywhere or len(nodes_here) > 1)
    )


def _by_node(nodes: Sequence[Sequence[int]], members: Sequence[int]) -> list[set[int]]:
    return [common for node in nodes if (common := set(node) & set(members))]


def sent_bytes(codec: LossyCodec, way: str, ranks: int, memory: CodecState) -> float:
    """Estimate the bytes that a rank sends of a bucket, as on the host; sums count as sums of a ring."""
    times = ranks - 1 if way == "gather" else 2 * (ranks - 1) / ranks
    return times * codec.sent_bytes(memory.elements, memory)


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
        self._group = group
        one_node = len(_by_node(nodes, group.members)) == 1
        self.residuals = Residuals(slots, reduction.codecs, over_nodes=False if one_node else None)
        self._kept: list[Any] = []  # by bucket: what its codec keeps on the device
        self._pulled: set[int] = set()  # buckets of which the host holds the same
        self._changed: set[int] = set()  # of which the host holds what the device shall keep
        self._reduction = reduction
        self._collectives = collectives
        self._slots = list(slots)
        self._offers: list[Offer | None] = [None] * len(self._slots)
        self.reason = "the device's collectives"

    def sizes(self, usual: Sizes) -> Sizes:
        return for_a_device(usual)

    def lay_out(self, arrangement: Arrangement) -> None:
        self._pull(range(len(self._kept)))
        self.arrangement = arrangement
        self.residuals.lay_out(arrangement.buckets)
        self._remember()
        self._push(range(len(self._kept)))

    def _remember(self) -> None:
        self._pulled, self._changed = set(range(len(self._buckets))), set()
        self._kept = [
            self._collectives.memory(
                bucket.elements, list(self.residuals.of_bucket(number).arrays), self.residuals.gaps(number)
            )
            for number, bucket in enumerate(self._buckets)
        ]

    # Between two steps the memories of the host hold what the device keeps, once somebody reads or changes it. What was
    # changed goes to the device with the next gradient.

    def _pull(self, buckets: Iterable[int]) -> None:
        for bucket in set(buckets) - self._pulled:
            self._pulled.add(bucket)
            self._kept[bucket].pull(self.residuals.of_bucket(bucket))
            if self.residuals.is_in_use:  # what was copied may be half of an operation that has begun meanwhile
                self._pulled.discard(bucket)

    def _push(self, buckets: Iterable[int]) -> None:
        self._pulled.update(buckets)
        self._changed.update(buckets)

    def reports(self) -> list[Report]:
        if not self.residuals.is_in_use:  # else as it was read last
            self._pull(range(len(self._kept)))
        return super().reports()

    def residual_norm(self, piece: Piece) -> float | None:
        return None  # to read it, the host would have to wait for the device

    def reset(self) -> None:
        super().reset()
        self._push(range(len(self._kept)))

    def checkpoint(self, keys: Sequence[Hashable]) -> Checkpoint:
        self._pull(range(len(self._kept)))
        return super().checkpoint(keys)

    def go_on_from(self, saved: Checkpoint, keys: Sequence[Hashable]) -> None:
        self._pull(range(len(self._kept)))
        super().go_on_from(saved, keys)
        self._push(range(len(self._kept)))

    def small(self, slot: int) -> Any:
        return None

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
        number, bucket = piece.bucket, self._buckets[piece.bucket]
        offers = [None if joined else self._offers[slot] for slot in bucket.slots]
        tensors = [  # the slots' flat ones, of zeros where there is no gradient
            self._collectives.allocate(self._slots[slot].elements, str(bucket.dtype)) if offer is None else offer.array
            for slot, offer in zip(bucket.slots, offers, strict=True)
        ]
        parts = list(zip(bucket.offsets, tensors, strict=True))
        paying = self.residuals.owes(number)
        debtors = [part for part, offer in zip(parts, offers, strict=True) if paying and offer is not None]
        memory = self.residuals.of_piece(piece)
        encodes, marks = self.residuals.encodes(number), list(marks)
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
        reduction, size = self._reduction, self._group.size
        codec = cast("LossyCodec", self.residuals.codec(bucket))
        op, scale = effective(reduction.op, reduction.postscale, size)
        assert op == ReduceOp.SUM, op
        memory.turn = int(memory.recall(TURN) or memory.turn)
        way, _ = codec.way(memory.elements, size)
        sent = sent_bytes(codec, way, size, memory)
        memory.tally.bytes_before += two_phase_bytes(buffer.nbytes, size)
        memory.tally.bytes_after += sent
        transfer = self._collectives.allreduce_encoded(
            buffer,
            parts,
            reduction.prescale,
            scale,
            codec,
            way,
            self._kept[bucket],
            memory.matrices(),
            memory.turn,
            marks,
            debtors,
        )
        memory.keep(TURN, memory.turn + 1)
        self._group.bytes_sent += int(sent)
        yield [transfer]
        self._forget_paid(bucket)

    def _steps(
        self, bucket: int, tensors: Sequence[Any], debtors: Parts, memory: CodecState, marks: Sequence[Any]
    ) -> Steps[None]:
        reduction, size = self._reduction, self._group.size
        op, scale = effective(reduction.op, reduction.postscale, size)
        codec = self.residuals.codec(bucket)
        cast_name = "none" if codec.encodes else codec.name
        kept = self._kept[bucket]
        transfer = self._collectives.allreduce(tensors, op, reduction.prescale, scale, cast_name, marks, kept, debtors)
        nbytes, dtype = sum(tensor.nbytes for tensor in tensors), self._buckets[bucket].dtype
        sent = two_phase_bytes(nbytes, size)  # as a ring sends, whatever the library does
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
