"""Gradients in the memory of a device, reduced there in place, or encoded, by the device's own collectives."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

from hvdkit.collectives.group import Group, Steps
from hvdkit.compression import Codec, LossyCodec, Memory
from hvdkit.compression.memory import TURN
from hvdkit.engine.buckets import Buckets, Reduction
from hvdkit.engine.memories import Memories, Report, State
from hvdkit.engine.offers import Offer
from hvdkit.engine.ops import effective
from hvdkit.engine.plan import Bucket, Slot
from hvdkit.engine.schedule import Piece
from hvdkit.kernels import ReduceOp
from hvdkit.transports.base import DeviceCollectives


def stays_on_device(
    codecs: Sequence[Codec], nodes: Sequence[Sequence[int]], members: Sequence[int], encodes: bool = True
) -> bool:
    """Whether all codecs of a plan of these ranks can do their work on the device: the same on all of them.

    On one node nothing is encoded, unless it was asked for everywhere; between nodes it is encoded on the device where
    each has one rank. Sums of nodes with several ranks are encoded in host memory. ``encodes``: whether that device
    encodes at all.
    """
    ours = _by_node(nodes, members)
    return all(
        encodes and codec.on_device and (codec.everywhere or len(ours) == len(members))
        for codec in codecs
        if codec.encodes and (codec.everywhere or len(ours) > 1)
    )


def _by_node(nodes: Sequence[Sequence[int]], members: Sequence[int]) -> list[set[int]]:
    return [found for node in nodes if (found := set(node) & set(members))]


def sent_bytes(codec: LossyCodec, way: str, ranks: int, memory: Memory) -> float:
    """About what a rank sends of a bucket, as on the host; sums count as those of a ring."""
    times = ranks - 1 if way == "gather" else 2 * (ranks - 1) / ranks
    return times * codec.sent_bytes(memory.elements, memory)


class DeviceBuckets(Buckets):
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
        self.memories = Memories(slots, reduction.codecs, over_nodes=False if one_node else None)
        self._kept: list[Any] = []  # by bucket: what its codec keeps on the device
        self._pulled: set[int] = set()  # buckets of which the host holds the same
        self._changed: set[int] = set()  # of which the host holds what the device shall keep
        self._reduction = reduction
        self._collectives = collectives
        self._buckets: list[Bucket] = []
        self._slots = list(slots)
        self._offers: list[Offer | None] = [None] * len(self._slots)
        self.told = "the device's collectives"

    def lay_out(self, buckets: Sequence[Bucket]) -> None:
        self._pull(range(len(self._kept)))
        self._buckets = list(buckets)
        self.memories.lay_out(buckets)
        self._remember()
        self._push(range(len(self._kept)))

    def _remember(self) -> None:
        self._pulled, self._changed = set(range(len(self._buckets))), set()
        self._kept = [
            self._collectives.memory(
                bucket.elements, list(self.memories.of_bucket(number).arrays), self.memories.gaps(number)
            )
            for number, bucket in enumerate(self._buckets)
        ]

    # Between two steps the memories of the host hold what the device keeps, once somebody reads or changes it. What was
    # changed goes to the device with the next gradient.

    def _pull(self, buckets: Iterable[int]) -> None:
        for bucket in set(buckets) - self._pulled:
            self._kept[bucket].pull(self.memories.of_bucket(bucket))
            self._pulled.add(bucket)

    def _push(self, buckets: Iterable[int]) -> None:
        self._pulled.update(buckets)
        self._changed.update(buckets)

    def reports(self) -> list[Report]:
        self._pull(range(len(self._kept)))
        return super().reports()

    def residual_norm(self, piece: Piece) -> float | None:
        return None  # to read it, the host would have to wait for the device

    def reset(self) -> None:
        super().reset()
        self._push(range(len(self._kept)))

    def kept(self) -> State:
        self._pull(range(len(self._kept)))
        return super().kept()

    def go_on_from(self, state: State) -> None:
        self._pull(range(len(self._kept)))
        super().go_on_from(state)
        self._push(range(len(self._kept)))

    def owe(self, slot: int, state: State, old_slot: int) -> None:
        buckets = [number for number, bucket in enumerate(self._buckets) if slot in bucket.slots]
        self._pull(buckets)
        super().owe(slot, state, old_slot)
        self._push(buckets)

    def small(self, slot: int) -> Any:
        return None

    def offer(self, slot: int, offer: Offer | None) -> None:
        self._offers[slot] = offer

    def end_step(self) -> None:
        self._offers = [None] * len(self._slots)

    def rescue(self) -> None:
        """What is in flight here is the device's own work, which ends with the communicator."""

    def _tensors(self, bucket: Bucket, joined: bool) -> tuple[list[Any], bool]:
        """The slots' flat tensors, and whether some of them were made of zeros just now."""
        offers = [None if joined else self._offers[slot] for slot in bucket.slots]
        made = any(offer is None for offer in offers)
        return [
            self._collectives.allocate(self._slots[slot].elements, str(bucket.dtype)) if offer is None else offer.array
            for slot, offer in zip(bucket.slots, offers, strict=True)
        ], made

    def mark(self) -> Any:
        while self._changed:
            bucket = self._changed.pop()
            self._kept[bucket].push(self.memories.of_bucket(bucket))
        return self._collectives.mark()

    def reduce(self, piece: Piece, joined: bool, marks: Sequence[Any], sequence: int, tag: int) -> Steps[None]:
        bucket = self._buckets[piece.bucket]
        tensors, made = self._tensors(bucket, joined)
        memory = self.memories.of_piece(piece)
        if self.memories.encodes(piece.bucket):
            flat = self._collectives.allocate(bucket.elements, str(bucket.dtype))
            parts = list(zip(bucket.offsets, tensors, strict=True))
            return self._encoded_steps(piece.bucket, flat, parts, memory, [*marks, self.mark()])
        codec = self.memories.codec(piece.bucket)
        marks = [*marks, self.mark()] if made else marks
        return self._steps(tensors, "none" if codec.encodes else codec.name, marks)

    def _encoded_steps(
        self, bucket: int, buffer: Any, parts: Sequence[tuple[int, Any]], memory: Memory, marks: Sequence[Any]
    ) -> Steps[None]:
        reduction, size = self._reduction, self._group.size
        codec = cast("LossyCodec", self.memories.codec(bucket))
        op, scale = effective(reduction.op, reduction.postscale, size)
        assert op == ReduceOp.SUM, op
        self._pulled.discard(bucket)
        memory.turn = int(memory.recall(TURN) or memory.turn)
        way, _ = codec.way(memory.elements, size)
        sent = sent_bytes(codec, way, size, memory)
        memory.tally.bytes_before += 2 * buffer.nbytes * (size - 1) // size
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
        )
        memory.keep(TURN, memory.turn + 1)
        self._group.bytes_sent += int(sent)
        yield [transfer]

    def _steps(self, tensors: Sequence[Any], codec: str, marks: Sequence[Any]) -> Steps[None]:
        reduction, size = self._reduction, self._group.size
        op, scale = effective(reduction.op, reduction.postscale, size)
        transfer = self._collectives.allreduce(tensors, op, reduction.prescale, scale, codec, marks)
        nbytes = sum(tensor.nbytes for tensor in tensors)
        self._group.bytes_sent += 2 * nbytes * (size - 1) // size  # as a ring sends, whatever the library does
        yield [transfer]

    def forget(self, quiet: bool) -> None:
        self.end_step()
        self.memories.forget()
        self._remember()

    def close(self) -> None:
        self._collectives.close()
