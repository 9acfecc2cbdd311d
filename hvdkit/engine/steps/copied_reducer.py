"""Gradients in the memory of a device that are reduced in host memory: copied there and back beside the computation.

For ranks whose devices have no collectives: those that share a GPU, MPI's, and codecs that encode on the host only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hvdkit.collectives.group import Array, Group, Steps
from hvdkit.collectives.hierarchical import Layout
from hvdkit.engine.steps.host_reducer import HostReducer
from hvdkit.engine.steps.node_pass import NodePass
from hvdkit.engine.steps.offers import FILLED, Offer, with_offers
from hvdkit.engine.steps.plan import Reduction, Slot
from hvdkit.engine.steps.reducer import OnBegin
from hvdkit.engine.steps.schedule import Piece
from hvdkit.transports.base import HostCopies, Pairs, Transfer


class CopiedReducer(HostReducer):
    """A HostReducer for gradients on a device: all slots have a place in the lane's block.

    When a bucket is complete, its pieces are copied from the device into the block. A reduced piece is copied back, and
    is over when the host has seen that copy end. ``opener`` opens copies between the device and the block.
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
        gradients, bucket = None if joined else self._gradients, self._buckets[piece.bucket]
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
