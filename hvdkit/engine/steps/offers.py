"""The gradients of one rank in one step: the memory of each and for its result, the block of small gradients, and the
parts of gradients in pieces."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from hvdkit.arena import SMALLEST_BYTES
from hvdkit.collectives.group import Array
from hvdkit.engine.steps.plan import Bucket, Slot
from hvdkit.engine.steps.schedule import Piece
from hvdkit.transports.base import aligned_empty


class Offer:
    """A gradient in memory of its owner, which neither reads nor writes it until the step is over.

    ``address``: of its elements, in the order of its slot. ``make_array`` returns them as a flat array, only when it is
    needed, and keeps their memory alive. ``source``: the memory of the gradient, if the result goes to other memory.
    ``array``: the flat array, if it exists already.
    """

    __slots__ = ("_array", "_make_array", "address", "source")

    def __init__(
        self, address: int, make_array: Callable[[], Any], source: Array | None = None, array: Array | None = None
    ) -> None:
        self.address, self.source = address, source
        self._make_array = make_array
        self._array: Any = array

    @property
    def array(self) -> Any:
        """Return the flat memory of the result: an array, or a tensor of a device."""
        if self._array is None:
            self._array = self._make_array()
        return self._array


def offer_of(array: Array, source: Array | None = None) -> Offer:
    """Return a flat array as an offer."""
    return Offer(array.__array_interface__["data"][0], _nothing, source, array)


def _nothing() -> Any:
    raise AssertionError("the gradient of a small slot lies in the slot")


# The gradient has been copied into its slot; see Reducer.small.
FILLED = Offer(0, _nothing)

Offsets = list[int | None]


def block_offsets(slots: Sequence[Slot], holds_all: bool = False) -> tuple[Offsets, int]:
    """Return the place of each slot in the block, in bytes, None for large slots; and the bytes of the block.

    A large slot can be an allocation of the arena. ``holds_all``: large slots have a place too.
    """
    offsets: Offsets = []
    end = 0
    for slot in slots:
        has_place = holds_all or slot.nbytes < SMALLEST_BYTES
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
            index: memory[offset : offset + slot.nbytes].view(slot.dtype)
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


class Part(NamedTuple):
    """A run of one slot's elements in a piece."""

    slot: int
    first: int  # element of the slot
    elements: int
    begin: int  # element of the piece
    offer: Offer | None  # None: zeros

    def array(self) -> Array | None:
        """Return the memory of the result."""
        return None if self.offer is None else self.offer.array[self.first : self.first + self.elements]

    def source(self) -> Array | None:
        """Return the memory of this rank's contribution if that is not ``array``."""
        source = None if self.offer is None else self.offer.source
        return None if source is None else source[self.first : self.first + self.elements]

    def within(self, share: tuple[int, int]) -> tuple[int, int]:
        """Return the elements of this part that lie in a share of its piece."""
        begin, end = (min(max(at - self.begin, 0), self.elements) for at in share)
        return begin, end

    def take(self, into: Array) -> None:
        """Copy this rank's contribution."""
        values = self.source()
        if values is None:
            values = self.array()
        into[...] = 0 if values is None else values


def runs_in(piece: Piece, bucket: Bucket, slots: Sequence[Slot]) -> list[Part]:
    """Return the slots' runs in a piece, as parts of zeros."""
    parts = []
    for slot, offset in zip(bucket.slots, bucket.offsets, strict=True):
        first = max(0, piece.begin - offset)
        last = min(slots[slot].elements, piece.end - offset)
        if first < last:
            parts.append(Part(slot, first, last - first, offset + first - piece.begin, None))
    return parts


def with_offers(runs: Sequence[Part], offers: Sequence[Offer | None] | None) -> list[Part]:
    """Return runs as parts of the offers, by slot; of zeros if there are no offers."""
    return [run._replace(offer=None if offers is None else offers[run.slot]) for run in runs]
