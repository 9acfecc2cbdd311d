"""What codecs keep of a lane's gradients: one memory for each bucket, laid out as the bucket is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hvdkit import kernels
from hvdkit.collectives.group import Array
from hvdkit.compression import Codec, Memory, PayloadCodec
from hvdkit.compression.memory import RESIDUAL, Place
from hvdkit.engine.plan import Bucket, Slot
from hvdkit.engine.schedule import Piece
from hvdkit.kernels import ReduceOp

Kept = dict[str, Array]  # by name: flat arrays of one tensor


@dataclass
class State:
    """What a lane's memories hold, to go on from elsewhere.

    ``place`` says what the arrays are of: only a rank at the same place of a lane of the same shape goes on with the
    same bits. ``units``: what a number in an array is multiplied with to become part of the result.
    """

    place: str
    slots: list[Kept]
    units: list[float]  # by slot
    numbers: dict[tuple[int, ...], dict[Place, float]]  # by the slots of a bucket


class Memories:
    """The memories of a lane's buckets. Buckets that are laid out anew keep what their slots kept."""

    def __init__(self, slots: Sequence[Slot], codecs: Sequence[Codec]) -> None:
        self._slots, self._codecs = list(slots), list(codecs)
        self._buckets: list[Bucket] = []
        self._memories: list[Memory] = []
        self._owed: list[Array | None] = []  # by bucket: what is added to this rank's next gradients

    def lay_out(self, buckets: Sequence[Bucket]) -> None:
        """From now on the lane has these buckets."""
        kept = {slot: self.of_slot(slot) for bucket in self._buckets for slot in bucket.slots}
        earlier = {bucket: memory.shared for bucket, memory in zip(self._buckets, self._memories, strict=True)}
        self._buckets = list(buckets)
        self._memories = [Memory(bucket.elements, self._keeps(bucket)) for bucket in buckets]
        self._owed = [None] * len(buckets)
        for bucket, memory in zip(self._buckets, self._memories, strict=True):
            memory.shared = earlier.get(bucket, memory.shared)
        for slot, arrays in kept.items():
            for name, array in self.of_slot(slot).items():
                array[...] = arrays[name]

    def codec(self, bucket: int) -> Codec:
        """What encodes a bucket."""
        return self._codecs[self._buckets[bucket].codec]

    def of_piece(self, piece: Piece) -> Memory:
        """The memory of a piece of a bucket."""
        return self._memories[piece.bucket].part(piece.begin, piece.end)

    def of_slot(self, slot: int) -> Kept:
        """What is kept of one tensor, by name: flat arrays, in the unit of what travels."""
        bucket, begin, end = self._where(slot)
        return self._memories[bucket].part(begin, end).arrays

    def _where(self, slot: int) -> tuple[int, int, int]:
        for number, bucket in enumerate(self._buckets):
            if slot in bucket.slots:
                begin = bucket.offsets[bucket.slots.index(slot)]
                return number, begin, begin + self._slots[slot].elements
        raise AssertionError(f"slot {slot} is in no bucket")

    def _keeps(self, bucket: Bucket) -> tuple[str, ...]:
        codec = self._codecs[bucket.codec]
        return codec.keeps if isinstance(codec, PayloadCodec) else ()

    # -- around a reduction -------------------------------------------------------------------------------------------

    def prepare(self, piece: Piece, buffer: Array) -> None:
        """Add what is owed to this rank's gradients in ``buffer``, a piece; zero what lies between them."""
        owed = self._owed[piece.bucket]
        if owed is not None:
            part = owed[piece.begin : piece.end]
            kernels.reduce_into(buffer, [buffer, part], ReduceOp.SUM)
            part[...] = 0
        if self.codec(piece.bucket).keeps_zeros:
            return
        bucket = self._buckets[piece.bucket]
        ends = [*bucket.offsets[1:], bucket.elements]
        kept = self.of_piece(piece).arrays
        for slot, offset, end in zip(bucket.slots, bucket.offsets, ends, strict=True):
            gap = slice(max(0, offset + self._slots[slot].elements - piece.begin), max(0, end - piece.begin))
            for array in (buffer, *kept.values()):
                array[gap] = 0

    def forget(self) -> None:
        """The lane was closed: keep nothing."""
        self._memories = [Memory(bucket.elements) for bucket in self._buckets]
        self._owed = [None] * len(self._buckets)

    # -- from run to run ----------------------------------------------------------------------------------------------

    @property
    def keeps_anything(self) -> bool:
        """Whether some codec keeps something."""
        return any(memory.arrays for memory in self._memories)

    def reset(self) -> None:
        """Forget what was not sent, and all that codecs remember of earlier steps."""
        for memory in self._memories:
            for array in memory.arrays.values():
                array[...] = 0
            memory.shared.numbers.clear()
        self._owed = [None] * len(self._buckets)

    def state(self, place: str, units: Sequence[float]) -> State:
        """A copy of all; ``units`` are by bucket."""
        slots: list[Kept] = []
        of_slots = []
        for slot in range(len(self._slots)):
            bucket, begin, end = self._where(slot)
            kept = {name: array.copy() for name, array in self.of_slot(slot).items()}
            owed = self._owed[bucket]
            if owed is not None and RESIDUAL in kept:
                kept[RESIDUAL] += owed[begin:end].astype(np.float32)
            slots.append(kept)
            of_slots.append(units[bucket])
        numbers = {
            bucket.slots: dict(memory.shared.numbers)
            for bucket, memory in zip(self._buckets, self._memories, strict=True)
        }
        return State(place, slots, of_slots, numbers)

    def restore(self, state: State, place: str, contribution: float) -> None:
        """Go on from a state, whose slots are those of this lane; see ``owe``."""
        if state.place != place:
            for slot, (kept, unit) in enumerate(zip(state.slots, state.units, strict=True)):
                self.owe(slot, kept, unit, contribution)
            return
        for slot, kept in enumerate(state.slots):
            for name, array in self.of_slot(slot).items():
                array[...] = kept[name]
        for bucket, memory in zip(self._buckets, self._memories, strict=True):
            memory.shared.numbers = dict(state.numbers.get(bucket.slots, {}))

    def owe(self, slot: int, kept: Mapping[str, Array], unit: float, contribution: float) -> None:
        """Add what was kept of a tensor elsewhere to this rank's next gradient of it.

        There it may have been of elements that another rank sends here. ``contribution``: what a number in a gradient
        is multiplied with to become part of the result; as ``unit`` was there for what was kept.
        """
        if RESIDUAL not in kept or contribution == 0.0:
            return
        bucket, begin, end = self._where(slot)
        owed = self._owed[bucket]
        if owed is None:
            owed = self._owed[bucket] = np.zeros(self._buckets[bucket].elements, self._buckets[bucket].dtype)
        owed[begin:end] += (kept[RESIDUAL] * np.float32(unit / contribution)).astype(owed.dtype)
