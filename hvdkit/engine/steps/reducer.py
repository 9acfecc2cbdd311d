"""The interface of reducers: in host memory our own algorithms, on a device its collectives."""

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
from hvdkit.engine.steps.plan import Arrangement, Reduction, Slot
from hvdkit.engine.steps.residuals import Checkpoint, Residuals
from hvdkit.engine.steps.schedule import Piece, Sizes, without_overlap
from hvdkit.engine.telemetry.compression_report import Report
from hvdkit.kernels import ReduceOp

# Returns the time at which each awaited rank was ready: {rank: seconds of perf_counter}.
ReadyAt = Callable[[], dict[int, float]]
OnBegin = Callable[[ReadyAt | None], None] | None  # None: nothing records it


class Reducer(ABC):
    """The reduction of a lane's gradients, cut into pieces of buckets, over a group.

    Gradients stay their owners': they are offered anew in each step, and hold the result when the step is over.
    """

    on_device: bool
    is_written_late: bool  # libraries write into gradients themselves, and may do so after a failure
    reason: str  # how and why, for the timeline
    takes_turns = False  # with the computation, which has every core: nothing is reduced before a step is finished
    copies_buckets = False  # a slot is reduced where it lies only if it is alone in its bucket
    arrangement: Arrangement  # of the lane: its buckets, and how they are cut

    def __init__(self, group: Group, reduction: Reduction, slots: Sequence[Slot], over_nodes: bool | None) -> None:
        self._group, self._reduction, self._slots = group, reduction, list(slots)
        self.residuals = Residuals(slots, reduction.codecs, over_nodes)  # what codecs keep
        self.layout: Layout | None = None  # how ranks lie on nodes, where the reduction goes by that
        self._effective = effective(reduction.op, reduction.postscale, group.size)

    def sizes(self, usual: Sizes) -> Sizes:
        """Return the sizes of the lane's buckets."""
        if self.takes_turns:
            return without_overlap(usual)
        return usual if self.copies_buckets else replace(usual, alone=None)

    @abstractmethod
    def lay_out(self, arrangement: Arrangement) -> None:
        """Use these buckets from now on."""

    def small(self, slot: int) -> Any:
        """Return the flat memory of a small gradient and its result; None for a large gradient."""
        return None

    @abstractmethod
    def offer(self, slots: Sequence[int], offers: Sequence[Any]) -> None:
        """Take this rank's gradients of slots: Offers, FILLED for small gradients in their place, None for zeros."""

    def mark(self) -> Any:
        """Return a mark of the calling thread's work so far; a reduction with this mark comes after that work."""
        return None

    @abstractmethod
    def reduce(self, piece: Piece, joined: bool, marks: Sequence[Any], tag: int, on_begin: OnBegin) -> Steps[None]:
        """Return the steps that replace a piece by its reduction over all ranks; a joined rank contributes zeros.

        The steps hold the memory that they need from this call on. ``tag`` up to ``tag + 3`` are this operation's.
        ``on_begin`` is called once, when the reduction begins: where ranks share memory, after they have waited for
        each other, with when each was ready.
        """

    def end_step(self) -> None:
        """Give offered gradients back to their owners; all ranks are through with them."""
        self.residuals.is_in_use = False

    @abstractmethod
    def rescue(self) -> None:
        """Keep late writes of other ranks away from this rank's gradients, because the step failed."""

    @abstractmethod
    def forget(self, quiet: bool) -> None:
        """Drop the memory of a closed lane, except offers and what zeros need. ``quiet``: nothing is in flight."""

    @abstractmethod
    def close(self) -> None:
        """Give back all memory; nothing can be reduced afterwards."""

    def residual_norm(self, piece: Piece) -> float | None:
        """Return the Euclidean norm of this rank's residual of a piece, where that is at hand."""
        return self.residuals.residual_norm(piece)

    def reports(self) -> list[Report]:
        """Return the effect of encoding, by tensor."""
        return self.residuals.reports()

    def reset(self) -> None:
        """Forget what codecs keep, between two steps."""
        self.residuals.reset()

    def checkpoint(self, keys: Sequence[Hashable]) -> Checkpoint:
        """Return a copy of the residuals, between two steps; see ``Residuals.checkpoint``."""
        return self.residuals.checkpoint(self.fingerprint(), self._units(), keys)

    def go_on_from(self, saved: Checkpoint, keys: Sequence[Hashable]) -> None:
        """Take over residuals, between two steps; see ``Residuals.restore``."""
        self.residuals.restore(saved, self.fingerprint(), self._units(), keys)

    def _units(self) -> list[dict[str, float]]:
        """Return by bucket and array the factor that makes a number which is kept there a part of the result.

        0.0 for what is owed where nothing can be added to the result, which is no sum.
        """
        op, scale = self._effective
        units = []
        for number, bucket in enumerate(self.arrangement.buckets):
            codec = self.residuals.codec(number)
            dense_first = self.layout is not None and len(self.layout.nodes) > 1 and not codec.everywhere
            late = split_scale(np.empty(0, bucket.dtype), op, scale, codec)[1] if dense_first else scale
            kept = {name: part * late.number for name, part in codec.owes.items()}
            units.append({**kept, OWED: scale.number if op == ReduceOp.SUM else 0.0})
        return units

    def fingerprint(self) -> str:
        """Return a hash of this rank's place in the group, the codecs and shapes of slots, and the encoded buckets."""
        group, layout = self._group, self.layout
        nodes = None if layout is None else [[group.members.index(rank) for rank in node] for node in layout.nodes]
        codecs = self._reduction.codecs
        slots = [(slot.shape, str(slot.dtype), codecs[slot.codec].summary) for slot in self._slots]
        encoded = [bucket.slots for bucket in self.arrangement.buckets if codecs[bucket.codec].encodes]
        origin = group.rank, group.size, nodes, int(self._reduction.op), self._reduction.postscale, slots, encoded
        return hashlib.sha256(repr(origin).encode()).hexdigest()
