"""What codecs keep of a lane's gradients: one memory for each bucket, laid out as the bucket is."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvdkit.collectives.group import Array
from hvdkit.collectives.hierarchical import Layout, node_shares, whole_shares
from hvdkit.compression import Codec, Memory
from hvdkit.compression.memory import OWED, RESIDUAL, TURN, Tally
from hvdkit.engine.steps.plan import Bucket, Slot
from hvdkit.engine.steps.schedule import Piece
from hvdkit.engine.telemetry.compression_report import Report

TOO_LARGE = (
    "{count} values that compression kept of '{name}' are not finite as a part of its gradient here, and are lost."
)

Kept = dict[str, Array]  # by name: flat arrays of one tensor
# A number or an array that a codec keeps of some elements of a bucket: the bucket's slots, its name, begin and end.
Note = tuple[tuple[int, ...], str, int, int, Any]


@dataclass
class State:
    """What a lane's memories hold, to go on from.

    ``fingerprint`` says what the arrays are of: only a rank at the same place of a lane of the same shape goes on with
    the same bits. Elsewhere what is ``owed`` is added once to the next gradients.
    """

    fingerprint: str
    slots: list[Kept]
    units: list[dict[str, float]]  # by slot and array: what a number there is multiplied with to be part of the result
    turn: int  # how often elements were reduced
    notes: list[Note]

    def owed(self, slot: int) -> Array | None:
        """What one tensor's part of the result lacks, as a vector in the unit of the result; None if nothing."""
        units = self.units[slot]
        parts = [array * np.float32(units[name]) for name, array in self.slots[slot].items() if name in units]
        return np.sum(parts, axis=0) if parts else None


class Residuals:
    """The memories of a lane's buckets. Buckets that are laid out anew keep what their slots kept.

    ``over_nodes``: None where no ranks share memory, so that each encodes what is its own; else whether there are
    several nodes, between which ranks encode shares of their node's sum.
    """

    def __init__(self, slots: Sequence[Slot], codecs: Sequence[Codec], over_nodes: bool | None = None) -> None:
        self._slots, self._codecs, self._over_nodes = list(slots), list(codecs), over_nodes
        self._buckets: list[Bucket] = []
        self._places: dict[int, tuple[int, int, int]] = {}  # by slot: its bucket, and where it begins and ends there
        self._gaps: dict[int, list[tuple[int, int]]] = {}
        self._memories: list[Memory] = []
        self._tallies: dict[tuple[int, int], Tally] = {}  # of operations under way, by bucket and begin
        self._totals: dict[int, Tally] = defaultdict(Tally)  # by slot, of those that were encoded
        self.is_in_use = False  # some operation of this step has begun

    def lay_out(self, buckets: Sequence[Bucket]) -> None:
        """From now on the lane has these buckets."""
        earlier = dict(zip(self._buckets, self._memories, strict=True))
        keeping = [bucket.slots for bucket, memory in earlier.items() if memory.arrays]
        kept = {slot: self.of_slot(slot) for slots in keeping for slot in slots}
        self._places = {
            slot: (number, offset, offset + self._slots[slot].elements)
            for number, bucket in enumerate(buckets)
            for slot, offset in zip(bucket.slots, bucket.offsets, strict=True)
        }
        self._buckets, self._memories, self._gaps = list(buckets), [], {}
        for bucket in buckets:
            memory = Memory(bucket.elements, self._keeps(bucket))
            memory.shared = earlier.get(bucket, memory).shared
            memory.shared.matrices = self._matrices(bucket)
            self._memories.append(memory)
        for slot, arrays in kept.items():
            for name, array in arrays.items():
                if array.any():
                    self._array(slot, name)[...] = array

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

    def shapes(self, bucket: int) -> list[tuple[int, ...]]:
        """Those of a bucket's tensors."""
        return [self._slots[slot].shape for slot in self._buckets[bucket].slots]

    def gaps(self, number: int) -> list[tuple[int, int]]:
        """The elements of a bucket that belong to none of its tensors."""
        if number not in self._gaps:
            bucket = self._buckets[number]
            ends = [*bucket.offsets[1:], bucket.elements]
            runs = [
                (offset + self._slots[slot].elements, end)
                for slot, offset, end in zip(bucket.slots, bucket.offsets, ends, strict=True)
            ]
            self._gaps[number] = [(begin, end) for begin, end in runs if begin < end]
        return self._gaps[number]

    def of_piece(self, piece: Piece) -> Memory:
        """The memory of a piece of a bucket, for one operation."""
        part = self._memories[piece.bucket].part(piece.begin, piece.end)
        self.is_in_use = True
        part.turn = part.shared.turn
        part.tally = self._tallies[piece.bucket, piece.begin] = Tally()
        return part

    def finished(self, piece: Piece) -> Tally:
        """What the operation on a piece cost and saved; its tensors' totals get their parts, by elements."""
        tally = self._tallies.pop((piece.bucket, piece.begin))
        if not self.codec(piece.bucket).lossy:
            return tally
        bucket = self._buckets[piece.bucket]
        inside = [
            max(0, min(piece.end, offset + self._slots[slot].elements) - max(piece.begin, offset))
            for slot, offset in zip(bucket.slots, bucket.offsets, strict=True)
        ]
        total = sum(inside)
        for slot, elements in zip(bucket.slots, inside, strict=True):
            if elements:
                self._totals[slot].add(tally, elements / total)
        return tally

    def residual_norm(self, piece: Piece) -> float:
        """The Euclidean norm of what this rank keeps of a piece."""
        return _norm(self._memories[piece.bucket].part(piece.begin, piece.end).residual)

    def reports(self) -> list[Report]:
        """What encoding did, by tensor."""
        found = []
        for slot, one in enumerate(self._slots):
            codec = self._codecs[one.codec]
            if codec.lossy:
                norm = _norm(self.of_slot(slot).get(RESIDUAL))
                found.append((one.name, codec.summary, self._totals[slot], norm))
        return found

    def of_slot(self, slot: int) -> Kept:
        """What is kept of one tensor, by name: flat arrays, in the unit of what travels."""
        bucket, begin, end = self._places[slot]
        return self._memories[bucket].part(begin, end).arrays

    def _array(self, slot: int, name: str) -> Array:
        """What is kept of one tensor under a name. Of what is owed there is an array only while something is."""
        bucket, begin, end = self._places[slot]
        arrays = self._memories[bucket].arrays
        if name not in arrays:
            arrays[name] = np.zeros(self._buckets[bucket].elements, dtype=np.float32)
        return arrays[name][begin:end]

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
        return OWED in self._memories[bucket].arrays

    def pay(self, piece: Piece, gradients: Sequence[tuple[int, Array]]) -> None:
        """Add what is owed to this rank's gradients in a piece: where each begins in it, and its values."""
        arrays = self._memories[piece.bucket].arrays
        owed = arrays.get(OWED)
        if owed is None:
            return
        for begin, values in gradients:
            _pay(owed[piece.begin + begin : piece.begin + begin + values.size], values)
        if not owed.any():
            del arrays[OWED]

    def clear_gaps(self, piece: Piece, flat: Array) -> None:
        """Zero what lies between tensors in ``flat``, a piece, and in what is kept of it.

        What was decoded into a gap would be encoded again, and some codecs make something of zeros.
        """
        gaps = self.gaps(piece.bucket)
        kept = self._memories[piece.bucket].part(piece.begin, piece.end).arrays if gaps else {}
        for begin, end in gaps:
            for array in (flat, *kept.values()):
                array[max(0, begin - piece.begin) : max(0, end - piece.begin)] = 0

    def forget(self) -> None:
        """The lane was closed: keep no arrays of gradients' size, but go on at the same turn, for those who do not."""
        for number, bucket in enumerate(self._buckets):
            memory = Memory(bucket.elements, self._keeps(bucket))
            memory.shared = self._memories[number].shared
            self._memories[number] = memory

    # -- from run to run ----------------------------------------------------------------------------------------------

    @property
    def keeps_anything(self) -> bool:
        """Whether some codec keeps something."""
        return any(memory.arrays or memory.shared.numbers or memory.shared.vectors for memory in self._memories)

    def reset(self) -> None:
        """Forget what was not sent, and all that codecs remember of earlier steps."""
        for memory in self._memories:
            memory.arrays.pop(OWED, None)
            for array in memory.arrays.values():
                array[...] = 0
            memory.shared.numbers.clear()
            memory.shared.vectors.clear()
            memory.shared.turn = 0

    def state(self, fingerprint: str, units: Sequence[dict[str, float]]) -> State:
        """A copy of all that is not zero; ``units`` are by bucket."""
        numbered = range(len(self._slots))
        slots = [{name: array.copy() for name, array in self.of_slot(slot).items() if array.any()} for slot in numbered]
        shared = [memory.shared for memory in self._memories]
        notes: list[Note] = [
            (bucket.slots, *where, deepcopy(one))
            for bucket, ours in zip(self._buckets, shared, strict=True)
            for where, one in [*ours.numbers.items(), *ours.vectors.items()]
        ]
        turns = [one.turn for one in shared] + [one for _, name, _, _, one in notes if name == TURN]
        units = [units[self._places[slot][0]] for slot in numbered]
        return State(fingerprint, slots, units, int(max(turns, default=0)), notes)

    def restore(
        self,
        state: State,
        fingerprint: str,
        units: Sequence[dict[str, float]],
        slots: Sequence[int | None] | None = None,
    ) -> None:
        """Go on from a state: with the same bits at the same ``fingerprint``, elsewhere by owing what was owed there.

        ``slots``: which one here each of the state's is, None if none; the same ones if left out. ``units`` as above.
        """
        self.start_at(state.turn)
        same = list(range(len(self._slots)))
        slots = same if slots is None else list(slots)
        if state.fingerprint != fingerprint or slots != same:
            for old, new in enumerate(slots):
                owed = state.owed(old)
                if new is not None and owed is not None:
                    self.owe(new, owed, units[self._places[new][0]][OWED])
            return
        for slot, kept in enumerate(state.slots):
            for name, array in kept.items():
                self._array(slot, name)[...] = array
        shared = {bucket.slots: memory.shared for bucket, memory in zip(self._buckets, self._memories, strict=True)}
        for bucket_slots, name, begin, end, one in state.notes:
            ours = shared[bucket_slots]
            notes = ours.vectors if isinstance(one, np.ndarray) else ours.numbers
            notes[name, begin, end] = deepcopy(one)

    def start_at(self, turn: int) -> None:
        """Elements that are not known to have been reduced count as if they were, so many times."""
        for memory in self._memories:
            memory.shared.turn = max(memory.shared.turn, turn)

    def owe(self, slot: int, values: Array, unit: float) -> None:
        """Add to this rank's next gradient of a tensor, once, what adds ``values`` to the result.

        ``unit``: what a gradient is multiplied with, after its own factor, to become part of the result; 0.0 where
        that is no sum, to which nothing can be added. What is too large for a number is not owed.
        """
        if unit == 0.0 or not values.any():
            return
        owed = self._array(slot, OWED)
        with np.errstate(all="ignore"):
            total = owed + values / np.float32(unit)
        fits = np.isfinite(total)
        np.copyto(owed, total, where=fits)
        if not fits.all():
            warnings.warn(TOO_LARGE.format(count=fits.size - fits.sum(), name=self._slots[slot].name), stacklevel=2)


def _pay(owed: Array, gradient: Array) -> None:
    """Add what is owed to a gradient; what does not fit in there, and all if that is not finite, is owed further on."""
    with np.errstate(all="ignore"):
        if not np.isfinite(gradient).all():
            return
        wide = np.float64 if gradient.dtype == np.float64 else np.float32
        total = (gradient.astype(wide) + owed).astype(gradient.dtype)
        fits = np.isfinite(total)
        np.copyto(gradient, total, where=fits)
        owed[fits] = 0


def _norm(array: Array | None) -> float:
    return 0.0 if array is None else float(np.linalg.norm(array))
