"""State of codecs for a lane's gradients: a CodecState for each bucket, laid out as the bucket is."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Hashable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvdkit.collectives.group import Array
from hvdkit.collectives.hierarchical import Layout, node_shares, whole_shares
from hvdkit.compression import Codec, CodecState
from hvdkit.compression.state import OWED, RESIDUAL, TURN, CommonState, Tally
from hvdkit.engine.steps.plan import Bucket, Slot
from hvdkit.engine.steps.schedule import Piece
from hvdkit.engine.telemetry.compression_report import Report

TOO_LARGE = (
    "Values that compression kept for '{name}' are not finite when scaled to its gradient here, and are lost: {count}"
)

Arrays = dict[str, Array]  # by kind, as RESIDUAL: flat float32 arrays of one tensor
# A number or vector: the first slot of its bucket, its name, its elements (begin, end), its value.
Note = tuple[int, str, int, int, Any]


@dataclass
class Checkpoint:
    """A copy of a lane's residuals. A lane with the same ``fingerprint`` goes on with the same bits.

    Elsewhere each tensor's ``owed`` is added once to its next gradient.
    """

    fingerprint: str
    arrays: dict[Any, Arrays]  # by a key of the tensor, in the order of slots
    units: dict[Any, dict[str, float]]  # by key and kind: the factor that makes an element a part of the result
    turn: int  # how often elements were reduced
    notes: list[Note]

    def owed(self, key: Hashable) -> Array | None:
        """Return the part of the result that a tensor lacks, as a vector; None if there is none."""
        units = self.units[key]
        parts = [array * np.float32(units[kind]) for kind, array in self.arrays[key].items() if kind in units]
        return np.sum(parts, axis=0) if parts else None


class Residuals:
    """The states of a lane's buckets. Buckets that are laid out anew keep the state of their slots.

    ``over_nodes``: None where no ranks share memory, so that each rank encodes its own gradients; else True if there
    are several nodes, between which ranks encode shares of their node's sum.
    """

    def __init__(self, slots: Sequence[Slot], codecs: Sequence[Codec], over_nodes: bool | None = None) -> None:
        self._slots, self._codecs, self._over_nodes = list(slots), list(codecs), over_nodes
        self._buckets: list[Bucket] = []
        self._places: dict[int, tuple[int, int, int]] = {}  # by slot: its bucket, and its elements (begin, end) there
        self._gaps: dict[int, list[tuple[int, int]]] = {}
        self._states: list[CodecState] = []
        self._tallies: dict[tuple[int, int], Tally] = {}  # of operations under way, by bucket and begin
        self._totals: dict[int, Tally] = defaultdict(Tally)  # by slot, of operations that ended
        self.is_in_use = False  # some operation of this step has begun

    def lay_out(self, buckets: Sequence[Bucket]) -> None:
        """Take over the buckets of a new arrangement."""
        earlier = dict(zip(self._buckets, self._states, strict=True))
        filled = [slot for bucket, state in earlier.items() if state.arrays for slot in bucket.slots]
        arrays = {slot: self.of_slot(slot) for slot in filled}
        self._places = {
            slot: (number, offset, offset + self._slots[slot].elements)
            for number, bucket in enumerate(buckets)
            for slot, offset in zip(bucket.slots, bucket.offsets, strict=True)
        }
        self._buckets, self._gaps = list(buckets), {}
        self._states = [
            self._state(bucket, earlier[bucket].shared if bucket in earlier else CommonState()) for bucket in buckets
        ]
        for slot in filled:
            for kind, array in arrays[slot].items():
                if array.any():
                    self._array(slot, kind)[...] = array

    def _state(self, bucket: Bucket, shared: CommonState) -> CodecState:
        """Return a state of zeros. ``matrices`` of tensors have their first dimension as rows."""
        codec = self._codecs[bucket.codec]
        state = CodecState(bucket.elements, codec.keeps if self._encodes_its_own(codec) or self._over_nodes else ())
        tensors = [(offset, self._slots[slot]) for slot, offset in zip(bucket.slots, bucket.offsets, strict=True)]
        rows = [(offset, slot, slot.shape[0] if slot.shape else 1) for offset, slot in tensors if slot.elements]
        # Assigned at once: an operation of a lane that is being closed may read them.
        shared.matrices = [(offset, count, slot.elements // count) for offset, slot, count in rows]
        state.shared = shared
        return state

    def codec(self, bucket: int) -> Codec:
        """Return the codec of a bucket."""
        return self._codecs[self._buckets[bucket].codec]

    def encodes(self, bucket: int) -> bool:
        """True if payloads of a bucket travel."""
        codec = self.codec(bucket)
        return codec.encodes and (self._encodes_its_own(codec) or bool(self._over_nodes))

    def _encodes_its_own(self, codec: Codec) -> bool:
        """True if a rank encodes its own gradients, not a share of its node's sum."""
        return codec.encodes and (codec.everywhere or self._over_nodes is None)

    def of_bucket(self, bucket: int) -> CodecState:
        """Return the state of a bucket."""
        return self._states[bucket]

    def gaps(self, number: int) -> list[tuple[int, int]]:
        """Return the elements of a bucket that belong to none of its tensors."""
        if number not in self._gaps:
            bucket = self._buckets[number]
            begins = [self._places[slot][2] for slot in bucket.slots]
            gaps = zip(begins, [*bucket.offsets[1:], bucket.elements], strict=True)
            self._gaps[number] = [(begin, end) for begin, end in gaps if begin < end]
        return self._gaps[number]

    def of_piece(self, piece: Piece) -> CodecState:
        """Return the state of a piece of a bucket, for one operation."""
        part = self._states[piece.bucket].part(piece.begin, piece.end)
        self.is_in_use = True
        part.turn = part.shared.turn
        part.tally = self._tallies[piece.bucket, piece.begin] = Tally()
        return part

    def finished(self, piece: Piece) -> Tally:
        """Return the tally of the operation on a piece, and add it to the totals of its tensors, by elements."""
        tally = self._tallies.pop((piece.bucket, piece.begin))
        places = [(slot, *self._places[slot][1:]) for slot in self._buckets[piece.bucket].slots]
        inside = {slot: min(piece.end, end) - max(piece.begin, begin) for slot, begin, end in places}
        total = sum(elements for elements in inside.values() if elements > 0)
        for slot, elements in inside.items():
            if elements > 0:
                self._totals[slot].add(tally, elements / total)
        return tally

    def residual_norm(self, piece: Piece) -> float:
        """Return the Euclidean norm of this rank's residual of a piece."""
        return _norm(self._states[piece.bucket].part(piece.begin, piece.end).residual)

    def reports(self) -> list[Report]:
        """Return the totals of each encoded tensor, and the norm of its residual."""
        return [
            (slot.name, codec.summary, self._totals[number], _norm(self.of_slot(number).get(RESIDUAL)))
            for number, slot in enumerate(self._slots)
            if (codec := self._codecs[slot.codec]).lossy
        ]

    def of_slot(self, slot: int) -> Arrays:
        """Return the arrays of one tensor."""
        bucket, begin, end = self._places[slot]
        return self._states[bucket].part(begin, end).arrays

    def _array(self, slot: int, kind: str) -> Array:
        """Return one array of a tensor. A bucket has an array of OWED only while something is owed."""
        bucket, begin, end = self._places[slot]
        arrays = self._states[bucket].arrays
        if kind not in arrays:
            arrays[kind] = np.zeros(self._buckets[bucket].elements, dtype=np.float32)
        return arrays[kind][begin:end]

    def shares(self, piece: Piece, layout: Layout, ranks: int) -> list[tuple[int, int]]:
        """Return the elements of a piece that each of a node's ranks carries between nodes."""
        bucket, codec = self._buckets[piece.bucket], self.codec(piece.bucket)
        if codec.whole_tensors and self._over_nodes:
            begins = [offset - piece.begin for offset in bucket.offsets]
            return whole_shares(begins, piece.end - piece.begin, layout, ranks)
        return node_shares(piece.end - piece.begin, bucket.dtype.itemsize, layout, ranks)

    def owes(self, bucket: int) -> bool:
        """True if something is to be added to this rank's next gradients of a bucket."""
        return OWED in self._states[bucket].arrays

    def pay(self, piece: Piece, gradients: Sequence[tuple[int, Array]]) -> None:
        """Add what is owed to this rank's gradients in a piece: the begin of each in the piece, and its values."""
        arrays = self._states[piece.bucket].arrays
        owed = arrays.get(OWED)
        if owed is None:
            return
        for begin, values in gradients:
            _pay(owed[piece.begin + begin : piece.begin + begin + values.size], values)
        if not owed.any():
            del arrays[OWED]

    def clear_gaps(self, piece: Piece, flat: Array) -> None:
        """Zero the elements between tensors in ``flat``, a piece, and in its state: they would be encoded again."""
        gaps = self.gaps(piece.bucket)
        arrays = self._states[piece.bucket].part(piece.begin, piece.end).arrays if gaps else {}
        for begin, end in gaps:
            for array in (flat, *arrays.values()):
                array[max(0, begin - piece.begin) : max(0, end - piece.begin)] = 0

    def forget(self) -> None:
        """Drop the arrays of a closed lane. Turns stay: a joined rank gives zeros at the turn of the others."""
        pairs = zip(self._buckets, self._states, strict=True)
        self._states = [self._state(bucket, state.shared) for bucket, state in pairs]

    @property
    def keeps_anything(self) -> bool:
        """True if some codec keeps something."""
        return any(state.arrays or state.shared.numbers or state.shared.vectors for state in self._states)

    def reset(self) -> None:
        """Forget what was not sent, and all other state of earlier steps."""
        self._states = [self._state(bucket, CommonState()) for bucket in self._buckets]

    def checkpoint(self, fingerprint: str, units: Sequence[dict[str, float]], keys: Sequence[Hashable]) -> Checkpoint:
        """Return a copy of all that is not zero; ``units`` are by bucket, ``keys`` by slot."""
        arrays = {
            key: {kind: array.copy() for kind, array in self.of_slot(slot).items() if array.any()}
            for slot, key in enumerate(keys)
        }
        units_of = {key: units[self._places[slot][0]] for slot, key in enumerate(keys)}
        notes: list[Note] = [
            (bucket.slots[0], *key, deepcopy(value))
            for bucket, state in zip(self._buckets, self._states, strict=True)
            for key, value in [*state.shared.numbers.items(), *state.shared.vectors.items()]
        ]
        turns = [state.shared.turn for state in self._states]
        turns += [int(value) for _, name, *_, value in notes if name == TURN]
        return Checkpoint(fingerprint, arrays, units_of, max(turns, default=0), notes)

    def restore(
        self, saved: Checkpoint, fingerprint: str, units: Sequence[dict[str, float]], keys: Sequence[Hashable]
    ) -> None:
        """Go on from a checkpoint: with the same bits at the same ``fingerprint``, else by owing its residuals."""
        self.start_at(saved.turn)
        is_same = saved.fingerprint == fingerprint and list(saved.arrays) == list(keys)
        for slot, key in enumerate(keys):
            if is_same:
                for kind, array in saved.arrays[key].items():
                    self._array(slot, kind)[...] = array
            elif key in saved.arrays and (owed := saved.owed(key)) is not None:
                self.owe(slot, owed, units[self._places[slot][0]][OWED])
        for slot, name, begin, end, value in saved.notes if is_same else ():
            shared = self._states[self._places[slot][0]].shared
            notes: dict[Any, Any] = shared.vectors if isinstance(value, np.ndarray) else shared.numbers
            notes[name, begin, end] = deepcopy(value)

    def start_at(self, turn: int) -> None:
        """Count elements without a turn of their own as reduced so many times."""
        for state in self._states:
            state.shared.turn = max(state.shared.turn, turn)

    def owe(self, slot: int, values: Array, unit: float) -> None:
        """Add to this rank's next gradient of a tensor, once, what adds ``values`` to the result.

        ``unit``: see ``Reducer``; with 0.0 nothing can be added. Values that are too large for a float32 are dropped
        with a warning.
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
    """Add what is owed to a gradient. A sum that overflows, or any to a gradient that is not finite, stays owed."""
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
