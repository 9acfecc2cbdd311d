"""A lane's block: memory of the host into which gradients are copied, and where their results are read."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

from hvdkit.arena import SMALLEST_BYTES
from hvdkit.collectives.group import Array
from hvdkit.engine.steps.offers import Offer, offer_of
from hvdkit.engine.steps.plan import Slot
from hvdkit.transports.base import aligned_empty

Offsets = list[int | None]


def is_small(slot: Slot) -> bool:
    """True if a gradient is too small for an allocation of the arena, so that it is copied into the block."""
    return slot.elements * slot.dtype.itemsize < SMALLEST_BYTES


def block_offsets(slots: Sequence[Slot], holds_all: bool = False) -> tuple[Offsets, int]:
    """Return the place of each slot in the block, in bytes, None for one without a place; and the bytes of the block.

    ``holds_all``: large slots have a place too.
    """
    offsets: Offsets = []
    end = 0
    for slot in slots:
        has_place = holds_all or is_small(slot)
        offsets.append(end if has_place else None)
        end += slot.padded * slot.dtype.itemsize if has_place else 0
    return offsets, end


def pages(nbytes: int) -> int:
    """Return ``nbytes`` rounded up to whole pages."""
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


class Block:
    """The block of one rank. ``memory``: its bytes, which may be shared with the other ranks of the node."""

    def __init__(self, memory: Array, slots: Sequence[Slot], offsets: Offsets) -> None:
        self.memory = memory
        self.places: dict[int, Array] = {
            index: memory[offset : offset + slot.elements * slot.dtype.itemsize].view(slot.dtype)
            for index, (slot, offset) in enumerate(zip(slots, offsets, strict=True))
            if offset is not None
        }
        self.offers: dict[int, Offer] = {slot: offer_of(place) for slot, place in self.places.items()}

    def leave(self) -> None:
        """Drop the references to the memory."""
        self.memory, self.places, self.offers = self.memory[:0].copy(), {}, {}


def private_block(slots: Sequence[Slot], holds_all: bool = False) -> Block:
    """Return a block that no other rank reaches."""
    offsets, nbytes = block_offsets(slots, holds_all)
    # A block of all slots may be page-locked. Two blocks must not share a page, which can be locked only once.
    memory = aligned_empty(pages(nbytes), mmap.PAGESIZE) if holds_all else aligned_empty(nbytes)
    return Block(memory, slots, offsets)
