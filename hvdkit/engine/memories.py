"""What codecs keep of a lane's gradients: one memory for each bucket, laid out as the bucket is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hvdkit.collectives.group import Array
from hvdkit.collectives.hierarchical import Layout, node_shares, whole_shares
from hvdkit.compression import Codec, Memory
from hvdkit.compression.memory import RESIDUAL, TURN, Place, Tally
from hvdkit.engine.plan import Bucket, Slot
from hvdkit.engine.schedule import Piece

Kept = dict[str, Array]  # by name: flat arrays of one tensor
# An encoded tensor, its codec, what that cost and saved, and the norm of what this rank keeps of it.
Report = tuple[Slot, str, Tally, float]


@dataclass
class State:
    """What a lane's memories hold, to go on from elsewhere.

    ``place`` says what the arrays are of: only a rank at the same place of a lane of the same shape goes on with the
    same bits. ``units``: what a number in an array is multiplied with to become part of the result; ``contribution``:
    the same for what is owed.
    """

    place: str
    slots: list[Kept]
    units: list[float]  # by slot
    owed: list[Array | None]  # by slot
    contribution: float
    turn: int  # how often elements were reduced
    numbers: dict[tuple[int, ...], dict[Place, float]]  # by the slots of a bucket
    vectors: dict[tuple[int, ...], dict[Place, Array]]


class Memories:
    """The memories of a lane's buckets. Buckets that are laid out anew keep what their slots kept.

    ``over_nodes``: None where no ranks share memory, so that each encodes what is its own; else whether there are
    several nodes, between which ranks encode shares of their node's sum.
    """

    def __init__(self, slots: Sequence[Slot], codecs: Sequence[Codec], over_nodes: bool | None = None) -> None:
        self._slots, self._codecs, self._over_nodes = list(slots), list(codecs), over_nodes
        self._buckets: list[Bucket] = []
        self._memories: list[Memory] = []
        self._owed: list[Array | None] = []  # by bucket: what is added to this rank's next gradients
        self._tallies: dict[tuple[int, int], Tally] = {}  # of operations under way, by bucket and begin
        self._totals = [Tally() for _ in slots]

    def lay_out(self, buckets: Sequence[Bucket]) -> None:
        """From now on the lane has these buckets."""
        kept = {slot: self.of_slot(slot) for bucket in self._buckets for slot in bucket.slots}
        earlier = dict(zip(self._buckets, zip(self._memories, self._owed, strict=True), strict=True))
        self._buckets, self._memories, self._owed = list(buckets), [], []
        for bucket in buckets:
            memory = Memory(bucket.elements, self._keeps(bucket))
            before, owed = earlier.get(bucket, (memory, None))
            memory.shared = before.shared
            memory.shared.matrices = self._matrices(bucket)
            self._memories.append(memory)
            self._owed.append(owed)
        for slot, arrays in kept.items():
            for name, array in self.of_slot(slot).items():
                array[...] = arrays[name]

    def codec(self, bucket: int) -> Codec:
        """What encodes a bucket."""
        return self._codecs[self._buckets[bucket].codec]

    def encodes(self, bucket: int) -> bool:
        """Whether payloads of a bucket travel."""
        codec = self.codec(bucket)
        return codec.encodes and (self.encodes_its_own(codec) or bool(self._over_nodes))

    def of_bucket(self, bucket: int) -> Memory:
        """The memory of a bucket."""
        return self._memories[bucket]

    def gaps(self, number: int) -> list[tuple[int, int]]:
        """The elements of a bucket that belong to none of its tensors."""
        bucket = self._buckets[number]
        ends = [*bucket.offsets[1:], bucket.elements]
        runs = [
            (offset + self._slots[slot].elements, end)
            for slot, offset, end in zip(bucket.slots, bucket.offsets, ends, strict=True)
        ]
        return [(begin, end) for begin, end in runs if begin < end]

    def of_piece(self, piece: Piece) -> Memory:
        """The memory of a piece of a bucket, for one operation."""
        part = self._memories[piece.bucket].part(piece.begin, piece.end)
        part.turn = part.shared.turn
        part.tally = self._tallies[piece.bucket, piece.begin] = Tally()
        return part

    def finished(self, piece: Piece) -> Tally:
        """What the operation on a piece cost and saved; its tensors' totals get their parts, by elements."""
        tally = self._tallies.pop((piece.bucket, piece.begin))
        bucket = self._buckets[piece.bucket]
        inside = [
            max(0, min(piece.end, offset + self._slots[slot].elements) - max(piece.begin, offset))
            for slot, offset in zip(bucket.slots, bucket.offsets, strict=True)
        ]
        for slot, elements in zip(bucket.slots, inside, strict=True):
            if elements:
                self._totals[slot].add(tally, elements / sum(inside))
        return tally

    def residual_norm(self, piece: Piece) -> float:
        """The Euclidean norm of what this rank keeps of a piece."""
        return _norm(self._memories[piece.bucket].part(piece.begin, piece.end).residual)

    def reports(self) -> list[Report]:
        """What encoding did, by tensor."""
        found = []
        for slot, total in enumerate(self._totals):
            codec = self._codecs[self._slots[slot].codec]
            if codec.encodes:
                found.append((self._slots[slot], codec.told, total, _norm(self.of_slot(slot).get(RESIDUAL))))
        return found

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

    def encodes_its_own(self, codec: Codec) -> bool:
        """Whether a rank encodes its own gradients, not a share of its node's sum."""
        return codec.encodes and (codec.everywhere or self._over_nodes is None)

    def _keeps(self, bucket: Bucket) -> tuple[str, ...]:
        codec = self._codecs[bucket.codec]
        return codec.keeps if self.encodes_its_own(codec) or self._over_nodes else ()

    def _matrices(self, bucket: Bucket) -> list[tuple[int, int, int]]:
        """Where the tensors are that have elements, as matrices: rows are the first dimension."""
        found = []
        for slot, offset in zip(bucket.slots, bucket.offsets, strict=True):
            shape, count = self._slots[slot].shape, self._slots[slot].elements
            rows = shape[0] if shape else 1
            if count:
                found.append((offset, rows, count // rows))
        return found

    def shares(self, piece: Piece, layout: Layout, ranks: int) -> list[tuple[int, int]]:
        """The elements of a piece that each of a node's ranks carries between nodes."""
        bucket, codec = self._buckets[piece.bucket], self.codec(piece.bucket)
        if codec.whole_tensors and self._over_nodes:
            begins = [offset - piece.begin for offset in bucket.offsets]
            return whole_shares(begins, piece.end - piece.begin, layout, ranks)
        return node_shares(piece.end - piece.begin, bucket.dtype.itemsize, layout, ranks)

    # -- around a reduction -------------------------------------------------------------------------------------------

    def owes(self, bucket: int) -> bool:
        """Whether something is added to this rank's next gradients of a bucket."""
        return self._owed[bucket] is not None

    def pay(self, piece: Piece, gradients: Sequence[tuple[int, Array]]) -> None:
        """Add what is owed to this rank's gradients in a piece: where each begins in it, and its values."""
        owed = self._owed[piece.bucket]
        if owed is None:
            return
        for begin, values in gradients:
            _pay(owed[piece.begin + begin : piece.begin + begin + values.size], values)
        if not owed.any():
            self._owed[piece.bucket] = None

    def clear_gaps(self, piece: Piece, flat: Array) -> None:
        """Zero what lies between tensors in ``flat``, a piece, and in what is kept of it.

        What was decoded into a gap would be encoded again, and some codecs make something of zeros.
        """
        kept = self._memories[piece.bucket].part(piece.begin, piece.end).arrays
        for begin, end in self.gaps(piece.bucket):
            for array in (flat, *kept.values()):
                array[max(0, begin - piece.begin) : max(0, end - piece.begin)] = 0

    def forget(self) -> None:
        """The lane was closed: keep no arrays of gradients' size, but go on at the same turn, for those who do not."""
        for number, bucket in enumerate(self._buckets):
            memory = Memory(bucket.elements, self._keeps(bucket))
            memory.shared = self._memories[number].shared
            self._memories[number], self._owed[number] = memory, None

    # -- from run to run ----------------------------------------------------------------------------------------------

    @property
    def keeps_anything(self) -> bool:
        """Whether some codec keeps something."""
        kept = any(memory.arrays or memory.shared.numbers or memory.shared.vectors for memory in self._memories)
        return kept or any(owed is not None for owed in self._owed)

    def reset(self) -> None:
        """Forget what was not sent, and all that codecs remember of earlier steps."""
        for memory in self._memories:
            for array in memory.arrays.values():
                array[...] = 0
            memory.shared.numbers.clear()
            memory.shared.vectors.clear()
            memory.shared.turn = 0
        self._owed = [None] * len(self._buckets)

    def state(self, place: str, units: Sequence[float], contribution: float) -> State:
        """A copy of all that is not zero; ``units`` are by bucket."""
        slots: list[Kept] = []
        of_slots: list[float] = []
        all_owed: list[Array | None] = []
        for slot in range(len(self._slots)):
            bucket, begin, end = self._where(slot)
            slots.append({name: array.copy() for name, array in self.of_slot(slot).items() if array.any()})
            of_slots.append(units[bucket])
            owed = self._owed[bucket]
            all_owed.append(None if owed is None else owed[begin:end].astype(np.float32))
        shared = {bucket.slots: memory.shared for bucket, memory in zip(self._buckets, self._memories, strict=True)}
        numbers = {slots: dict(one.numbers) for slots, one in shared.items()}
        vectors = {
            slots: {where: vector.copy() for where, vector in one.vectors.items()} for slots, one in shared.items()
        }
        turns = [number for ours in numbers.values() for (name, _, _), number in ours.items() if name == TURN]
        turn = int(max([one.turn for one in shared.values()] + turns, default=0))
        return State(place, slots, of_slots, all_owed, contribution, turn, numbers, vectors)

    def restore(self, state: State, place: str, units: Sequence[float], contribution: float) -> None:
        """Go on from a state, whose slots are those of this lane; see ``owe``."""
        self.start_at(state.turn)
        for slot, owed in enumerate(state.owed):
            if owed is not None:
                self.owe_gradient(slot, owed, state.contribution, units, contribution)
        if state.place != place:
            for slot, (kept, unit) in enumerate(zip(state.slots, state.units, strict=True)):
                self.owe(slot, kept, unit, units, contribution)
            return
        for slot, kept in enumerate(state.slots):
            for name, array in self.of_slot(slot).items():
                array += kept.get(name, np.float32(0))
        for bucket, memory in zip(self._buckets, self._memories, strict=True):
            memory.shared.numbers = dict(state.numbers.get(bucket.slots, {}))
            memory.shared.vectors = {
                where: vector.copy() for where, vector in state.vectors.get(bucket.slots, {}).items()
            }

    def start_at(self, turn: int) -> None:
        """Elements that are not known to have been reduced count as if they were, so many times."""
        for memory in self._memories:
            memory.shared.turn = max(memory.shared.turn, turn)

    def owe(
        self, slot: int, kept: Mapping[str, Array], unit: float, units: Sequence[float], contribution: float
    ) -> None:
        """Take over what was kept of a tensor elsewhere, where a number was multiplied with ``unit``.

        It goes where it was if this rank encodes its own gradients; else what was not sent is added to the next
        gradient, since it may be of elements that another rank sends here. ``units`` and ``contribution`` are what a
        number in an array, and in a gradient, is multiplied with here to become part of the result.
        """
        bucket, _, _ = self._where(slot)
        mine = self.of_slot(slot)
        if self.encodes_its_own(self.codec(bucket)) and RESIDUAL in mine:
            for name, array in mine.items():
                if name in kept and units[bucket] != 0.0:
                    array += kept[name] * np.float32(unit / units[bucket])
        elif RESIDUAL in kept:
            self._add_owed(slot, kept[RESIDUAL], unit / self._gain(bucket), contribution)

    def owe_gradient(self, slot: int, owed: Array, unit: float, units: Sequence[float], contribution: float) -> None:
        """Take over what was owed to a tensor elsewhere, and had not been added to a gradient yet."""
        bucket, _, _ = self._where(slot)
        residual = self.of_slot(slot).get(RESIDUAL)
        if self.encodes_its_own(self.codec(bucket)) and residual is not None and units[bucket] != 0.0:
            residual += owed * np.float32(unit * self._gain(bucket) / units[bucket])
        else:
            self._add_owed(slot, owed, unit, contribution)

    def _gain(self, bucket: int) -> float:
        codec = self.codec(bucket)
        return codec.gain if self._keeps(self._buckets[bucket]) else 1.0

    def _add_owed(self, slot: int, values: Array, unit: float, contribution: float) -> None:
        if contribution == 0.0:
            return
        bucket, begin, end = self._where(slot)
        owed = self._owed[bucket]
        if owed is None:
            dtype = np.float64 if self._buckets[bucket].dtype == np.float64 else np.float32
            owed = self._owed[bucket] = np.zeros(self._buckets[bucket].elements, dtype)
        owed[begin:end] += values * np.float32(unit / contribution)


def _pay(owed: Array, gradient: Array) -> None:
    """Add what is owed to a gradient; what does not fit in there, and all if that is not finite, is owed further on."""
    with np.errstate(all="ignore"):
        if not np.isfinite(gradient).all():
            return
        total = (gradient.astype(owed.dtype) + owed).astype(gradient.dtype)
        fits = np.isfinite(total)
        np.copyto(gradient, total, where=fits)
        owed[fits] = 0


def _norm(array: Array | None) -> float:
    return 0.0 if array is None else float(np.linalg.norm(array))
