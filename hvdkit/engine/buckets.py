"""Where the buckets of a lane live, and how one is reduced: in host memory by our own algorithms, or on a device."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvdkit import kernels
from hvdkit.collectives.compressed import allreduce_encoded
from hvdkit.collectives.group import Group, Steps
from hvdkit.collectives.hierarchical import Layout, early_scale, layout_allreduce
from hvdkit.compression import Codec, LossyCodec, Memory
from hvdkit.engine.execution import effective
from hvdkit.engine.memories import Memories, Report, State
from hvdkit.engine.plan import Bucket, Slot
from hvdkit.engine.schedule import Piece
from hvdkit.kernels import ReduceOp
from hvdkit.transports.base import aligned_empty


@dataclass(frozen=True)
class Reduction:
    """What a plan does to its buckets."""

    op: ReduceOp
    prescale: float
    postscale: float
    codecs: tuple[Codec, ...]  # slots say which one is theirs


class Buckets(ABC):
    """Memory that can be sliced and assigned to like a flat array, and its reduction over a group."""

    on_device: bool
    told: str  # how and why, for the timeline
    layout: Layout | None = None  # how ranks lie on nodes, where the reduction goes by that
    memories: Memories  # what codecs keep
    pieces: Sequence[Piece] = ()  # how the lane cuts its buckets
    _group: Group
    _reduction: Reduction
    _buckets: list[Bucket]

    @abstractmethod
    def lay_out(self, buckets: Sequence[Bucket]) -> None:
        """From now on the lane has these buckets; what its memory holds is lost."""

    @abstractmethod
    def buffers(self) -> list[Any]:
        """The memory of each bucket, zeros at first: the gaps between slots travel too."""

    @abstractmethod
    def mark(self) -> Any:
        """What the calling thread has done so far; the reduction of what it wrote comes after that."""

    @abstractmethod
    def reduce(self, piece: Piece, joined: bool, marks: Sequence[Any], sequence: int, tag: int) -> Steps[None]:
        """The steps that replace a piece by its reduction over all ranks; a rank that has joined contributes zeros.

        They hold the memory they need from this call on.

        ``sequence`` counts the lane's operations, alike on all ranks; ``tag`` up to ``tag + 3`` are this one's.
        """

    @abstractmethod
    def forget(self, quiet: bool) -> None:
        """The lane was closed: keep no memory, but be ready to give zeros. ``quiet``: nothing is in flight."""

    @abstractmethod
    def close(self) -> None:
        """Give back what is held for reducing; nothing can be reduced afterwards."""

    def contribution(self) -> float:
        """What a gradient, after its own factor, is multiplied with to become part of the result.

        0.0 where nothing can be added to it: the result is no sum, or gradients are on a device.
        """
        op, scale = effective(self._reduction.op, self._reduction.postscale, self._group.size)
        return scale if op == ReduceOp.SUM and not self.on_device else 0.0

    def units(self) -> list[float]:
        """By bucket: what a number that a codec keeps is multiplied with to become part of the result."""
        op, scale = effective(self._reduction.op, self._reduction.postscale, self._group.size)
        units = []
        for number, bucket in enumerate(self._buckets):
            codec = self.memories.codec(number)
            over_nodes = self.layout is not None and len(self.layout.nodes) > 1
            dense_first = over_nodes and not (isinstance(codec, LossyCodec) and codec.everywhere)
            units.append(early_scale(np.empty(0, bucket.dtype), op, scale, codec)[1] if dense_first else scale)
        return units

    def reports(self) -> list[Report]:
        """What encoding did, by tensor."""
        return self.memories.reports()

    def residual_norm(self, piece: Piece) -> float | None:
        """The Euclidean norm of what this rank keeps of a piece, where that is at hand."""
        return self.memories.residual_norm(piece)

    def reset(self) -> None:
        """Forget what codecs keep, between two steps."""
        self.memories.reset()

    def kept(self) -> State:
        """A copy of what codecs keep, between two steps."""
        return self.memories.state(self.place(), self.units(), self.contribution())

    def go_on_from(self, state: State) -> None:
        """Take over what codecs kept of the same slots, between two steps."""
        self.memories.restore(state, self.place(), self.units(), self.contribution())

    def owe(self, slot: int, state: State, old_slot: int) -> None:
        """Take over what was kept elsewhere of one tensor, between two steps."""
        units, contribution = self.units(), self.contribution()
        self.memories.start_at(state.turn)
        self.memories.owe(slot, state.slots[old_slot], state.units[old_slot], units, contribution)
        owed = state.owed[old_slot]
        if owed is not None:
            self.memories.owe_gradient(slot, owed, state.contribution, units, contribution)

    def switch_off(self, reasons: Mapping[int, str]) -> None:
        """Encode these buckets no more, between two steps."""
        units, contribution = self.units(), self.contribution()
        for bucket, reason in reasons.items():
            self.memories.switch_off(bucket, reason, units, contribution)

    def place(self) -> str:
        """What codecs keep here is of: this rank's part of these buckets and pieces, among these nodes."""
        group, layout = self._group, self.layout
        nodes = None if layout is None else [[group.members.index(rank) for rank in node] for node in layout.nodes]
        encoded = [
            (
                bucket.slots, bucket.offsets, str(bucket.dtype), codec.told, unit,
                sorted((piece.begin, piece.end) for piece in self.pieces if piece.bucket == number),
            )
            for number, (bucket, unit) in enumerate(zip(self._buckets, self.units(), strict=True))
            if isinstance(codec := self.memories.asked_codec(number), LossyCodec)
        ]  # fmt: skip
        return hashlib.sha256(repr((group.rank, group.size, nodes, encoded)).encode()).hexdigest()

    def discard(self) -> None:
        """Give back what was taken for reducing, before anything was: the ranks have agreed on another home."""
        self.close()


class HostBuckets(Buckets):
    """numpy arrays in this rank's own memory; ``layout``: how ranks lie on nodes, where some of them share memory."""

    on_device = False

    def __init__(self, group: Group, reduction: Reduction, layout: Layout | None, slots: Sequence[Slot]) -> None:
        self._group = group
        self.memories = Memories(slots, reduction.codecs, None if layout is None else len(layout.nodes) > 1)
        self._reduction = reduction
        self.layout = layout
        self._buckets: list[Bucket] = []
        self._buffers: list[Any] = []
        self.told = "over nodes" if layout is not None else "no shared memory"

    def lay_out(self, buckets: Sequence[Bucket]) -> None:
        self._buckets, self._buffers = list(buckets), []
        self.memories.lay_out(buckets)

    def buffers(self) -> list[Any]:
        if not self._buffers:
            self._buffers = [aligned_empty(bucket.nbytes).view(bucket.dtype) for bucket in self._buckets]
            for buffer in self._buffers:
                buffer[...] = 0
        return self._buffers

    def mark(self) -> Any:
        return None

    def reduce(self, piece: Piece, joined: bool, marks: Sequence[Any], sequence: int, tag: int) -> Steps[None]:
        if joined:
            buffer = np.zeros(piece.end - piece.begin, self._buckets[piece.bucket].dtype)
        else:
            buffer = self._buffers[piece.bucket][piece.begin : piece.end]
        return self._steps(piece, buffer, self.memories.of_piece(piece), tag)

    def _steps(self, piece: Piece, buffer: Any, memory: Memory, tag: int) -> Steps[None]:
        group, reduction, layout = self._group, self._reduction, self.layout
        op, scale = effective(reduction.op, reduction.postscale, group.size)
        if reduction.prescale != 1.0:
            kernels.scale_into(buffer, buffer, reduction.prescale)
        codec = self.memories.codec(piece.bucket)
        self.memories.prepare(piece, buffer)
        if layout is None or (isinstance(codec, LossyCodec) and codec.everywhere):
            yield from allreduce_encoded(group, buffer, op, scale, codec, tag, memory)
        else:
            ranks = next(len(node) for node in layout.nodes if group.members[group.rank] in node)
            shares = self.memories.shares(piece, layout, ranks)
            yield from layout_allreduce(group, layout, buffer, op, scale, codec, tag, (0, 0), None, memory, shares)

    def forget(self, quiet: bool) -> None:
        self._buffers = []
        self.memories.forget()

    def close(self) -> None:
        self._buffers = []
