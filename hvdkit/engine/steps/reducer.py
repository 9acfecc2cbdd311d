"""What reduces the gradients of a lane: in host memory our own algorithms, on a device its collectives."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from hvdkit.collectives.group import Group, Steps
from hvdkit.collectives.hierarchical import Layout, split_scale
from hvdkit.compression.state import OWED
from hvdkit.engine.ops import effective
from hvdkit.engine.steps.arrangement import Arrangement
from hvdkit.engine.steps.plan import Bucket, Reduction, Slot
from hvdkit.engine.steps.residuals import Checkpoint, Residuals
from hvdkit.engine.steps.schedule import Piece, Sizes, without_overlap
from hvdkit.engine.telemetry.compression_report import Report
from hvdkit.kernels import ReduceOp

# When each rank that was waited for was ready, {rank: seconds of perf_counter}, for who wants to know.
ReadyAt = Callable[[], dict[int, float]]
Met = Callable[[ReadyAt | None], None]


class Reducer(ABC):
    """Where the gradients of a lane are, and how runs of them, cut out of buckets, are reduced over a group.

    Gradients stay their owners': each step's are offered anew, and hold the result when the step is over.
    """

    on_device: bool
    is_written_late: bool  # libraries write into gradients themselves, and may do so after a failure
    reason: str  # how and why, for the timeline
    takes_turns = False  # with the computation, which has every core: nothing is reduced before a step is finished
    copies_buckets = False  # a slot is reduced where it lies only if it is alone in its bucket
    layout: Layout | None = None  # how ranks lie on nodes, where the reduction goes by that
    residuals: Residuals  # what codecs keep
    arrangement: Arrangement  # of the lane: its buckets, and how they are cut
    _group: Group
    _reduction: Reduction
    _slots: list[Slot]

    @property
    def _buckets(self) -> list[Bucket]:
        return self.arrangement.buckets

    def sizes(self, usual: Sizes) -> Sizes:
        """Those of the lane's buckets."""
        if self.takes_turns:
            return without_overlap(usual)
        return usual if self.copies_buckets else replace(usual, alone=None)

    @abstractmethod
    def lay_out(self, arrangement: Arrangement) -> None:
        """From now on the lane has these buckets."""

    @abstractmethod
    def small(self, slot: int) -> Any:
        """The flat memory into which a small gradient is copied, and where its result is read; None for a large one."""

    @abstractmethod
    def offer(self, slot: int, offer: Any) -> None:
        """This rank's gradient of a slot is complete; None: it has none, contributes zeros, and wants no result.

        ``FILLED`` for a small one that was copied to its place.
        """

    @abstractmethod
    def mark(self) -> Any:
        """What the calling thread has done so far; the reduction of what it wrote comes after that."""

    @abstractmethod
    def reduce(self, piece: Piece, joined: bool, marks: Sequence[Any], tag: int, met: Met) -> Steps[None]:
        """The steps that replace a piece by its reduction over all ranks; a rank that has joined contributes zeros.

        They hold the memory they need from this call on.

        ``tag`` up to ``tag + 3`` are this operation's. ``met`` is called once, when the reduction begins: where
        ranks share memory, after they have waited for each other, with when each was ready.
        """

    def end_step(self) -> None:
        """All ranks are through with the gradients that were offered: they are their owner's again."""
        self.residuals.is_in_use = False

    @abstractmethod
    def rescue(self) -> None:
        """The step has failed: whatever other ranks still write must not reach this rank's gradients any more."""

    @abstractmethod
    def forget(self, quiet: bool) -> None:
        """The lane was closed: keep no memory, but be ready to give zeros. ``quiet``: nothing is in flight.

        What was offered stays as it is until ``end_step``.
        """

    @abstractmethod
    def close(self) -> None:
        """Give back what is held for reducing; nothing can be reduced afterwards."""

    def units(self) -> list[dict[str, float]]:
        """By bucket and array: what a number that is kept there is multiplied with to become part of the result.

        0.0 for what is owed where nothing can be added to the result, which is no sum.
        """
        op, scale = effective(self._reduction.op, self._reduction.postscale, self._group.size)
        units = []
        for number, bucket in enumerate(self._buckets):
            codec = self.residuals.codec(number)
            over_nodes = self.layout is not None and len(self.layout.nodes) > 1
            dense_first = over_nodes and not codec.everywhere
            late = split_scale(np.empty(0, bucket.dtype), op, scale, codec)[1] if dense_first else scale
            kept = {name: part * late.number for name, part in codec.owes.items()}
            units.append({**kept, OWED: scale.number if op == ReduceOp.SUM else 0.0})
        return units

    def reports(self) -> list[Report]:
        """What encoding did, by tensor."""
        return self.residuals.reports()

    def residual_norm(self, piece: Piece) -> float | None:
        """The Euclidean norm of what this rank keeps of a piece, where that is at hand."""
        return self.residuals.residual_norm(piece)

    def reset(self) -> None:
        """Forget what codecs keep, between two steps."""
        self.residuals.reset()

    def checkpoint(self, keys: Sequence[Hashable]) -> Checkpoint:
        """Return a copy of the residuals, between two steps; see ``Residuals.checkpoint``."""
        return self.residuals.checkpoint(self.fingerprint(), self.units(), keys)

    def go_on_from(self, saved: Checkpoint, keys: Sequence[Hashable]) -> None:
        """Take over residuals, between two steps; see ``Residuals.restore``."""
        self.residuals.restore(saved, self.fingerprint(), self.units(), keys)

    def fingerprint(self) -> str:
        """Return a hash of this rank's place in the group, the codecs and shapes of slots, and the encoded buckets."""
        group, layout = self._group, self.layout
        nodes = None if layout is None else [[group.members.index(rank) for rank in node] for node in layout.nodes]
        codecs = self._reduction.codecs
        slots = [(slot.shape, str(slot.dtype), codecs[slot.codec].summary) for slot in self._slots]
        encoded = [bucket.slots for bucket in self._buckets if codecs[bucket.codec].encodes]
        origin = group.rank, group.size, nodes, int(self._reduction.op), self._reduction.postscale, slots, encoded
        return hashlib.sha256(repr(origin).encode()).hexdigest()
