"""What a codec keeps of a DDP model's gradients: in units, which outlive the buckets that DDP lays out anew.

DDP lays out its buckets after the first step, and again after the first step of a resumed run. A unit is the gradients
that were encoded together, in one order, with one memory. It stays as it is while all of it comes in one bucket, so
that a resumed run encodes what an uninterrupted one encodes; else what was kept moves, parameter by parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from hvdkit.collectives.group import Array
from hvdkit.compression import Codec, Memory
from hvdkit.compression.memory import TURN, Place
from hvdkit.torch.arrays import as_array


@dataclass(frozen=True)
class Member:
    """A parameter whose gradient is encoded: its place among all parameters, and its matrix."""

    place: int
    rows: int
    cols: int

    @property
    def elements(self) -> int:
        return self.rows * self.cols


class Unit:
    """Gradients that are encoded together."""

    def __init__(self, members: Sequence[Member], codec: Codec, turn: int) -> None:
        self.members = tuple(members)
        self.bounds: dict[int, tuple[int, int]] = {}  # by place: where its elements begin and end
        end = 0
        for member in members:
            self.bounds[member.place] = end, end + member.elements
            end += member.elements
        self.memory = Memory(end, codec.keeps)
        self.memory.turn = turn
        self.memory.shared.matrices = [
            (self.bounds[one.place][0], one.rows, one.cols) for one in members if one.elements
        ]

    @property
    def places(self) -> tuple[int, ...]:
        return tuple(self.bounds)

    @property
    def turn(self) -> int:
        """How often it was reduced."""
        return int(self.memory.recall(TURN) or self.memory.turn)

    def kept(self, place: int) -> _Kept:
        """What is kept of one parameter."""
        begin, end = self.bounds[place]
        arrays = {name: array[begin:end] for name, array in self.memory.arrays.items()}
        shared = self.memory.shared.vectors
        return _Kept(arrays, {name: one for (name, *bounds), one in shared.items() if bounds == [begin, end]})

    def take(self, place: int, kept: _Kept) -> None:
        """Go on from what was kept of one parameter elsewhere."""
        begin, end = self.bounds[place]
        for name, array in kept.arrays.items():
            self.memory.arrays[name][begin:end] = array
        for name, vector in kept.vectors.items():
            self.memory.shared.vectors[name, begin, end] = vector


@dataclass
class _Kept:
    arrays: dict[str, Array] = field(default_factory=dict)
    vectors: dict[str, Array] = field(default_factory=dict)


class Units:
    """All units of a model. Each parameter that is encoded is in one of them, once it was seen."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self._of: dict[int, Unit] = {}  # by place
        self._homeless: dict[int, _Kept] = {}  # by place, until its new bucket comes
        self.turn = 0

    def all(self) -> list[Unit]:
        """In the order in which they came to be."""
        return list(dict.fromkeys(self._of.values()))

    def arrange(self, members: Sequence[Member]) -> list[Unit]:
        """The units of the encoded parameters of one bucket: those there are if they fit, else one of all.

        Raises ValueError for a parameter that has not the shape of what was loaded.
        """
        places = {member.place for member in members}
        units = list(dict.fromkeys(self._of[place] for place in places if place in self._of))
        for member in members:
            self._check(member)
        # The order of units is that of their first parameters, the same on all ranks.
        units.sort(key=lambda unit: unit.places)
        if sum(len(unit.places) for unit in units) == len(places) and all(places.issuperset(u.places) for u in units):
            return units
        for unit in units:
            self.turn = max(self.turn, unit.turn)
            for place in unit.places:
                self._homeless[place] = unit.kept(place)
                del self._of[place]
        unit = Unit(members, self.codec, self.turn)
        for place in unit.places:
            unit.take(place, self._homeless.pop(place, _Kept()))
            self._of[place] = unit
        return [unit]

    def _check(self, member: Member) -> None:
        unit = self._of.get(member.place)
        if unit is None:
            return
        theirs = next(one for one in unit.members if one.place == member.place)
        if theirs != member:
            raise ValueError(
                f"the state_dict is of another model: parameter {member.place}, counted from the last, was "
                f"of {theirs.rows} x {theirs.cols} elements there, and has {member.rows} x {member.cols}"
            )

    # -- from run to run ----------------------------------------------------------------------------------------------

    def saved(self) -> dict[str, Any]:
        """A copy of all, in lists, numbers and tensors."""
        units = self.all()
        return {
            "turn": max([self.turn, *(unit.turn for unit in units)]),
            "units": [
                {
                    "members": [[one.place, one.rows, one.cols] for one in unit.members],
                    "kept": {name: torch.from_numpy(array.copy()) for name, array in unit.memory.arrays.items()},
                    "numbers": [[*place, number] for place, number in unit.memory.shared.numbers.items()],
                    "vectors": [
                        [*place, torch.from_numpy(one.copy())] for place, one in unit.memory.shared.vectors.items()
                    ],
                }
                for unit in units
            ],
        }

    def restore(
        self, layout: Mapping[str, Any], summed: Sequence[Mapping[str, Any]], factor: float, same_codec: bool, own: bool
    ) -> None:
        """Go on from what was saved.

        The units and what all ranks know alike are those of ``layout``. What is kept is ``factor`` times the sum of
        what ``summed`` say. If that is what this very rank said (``own``), its numbers are taken too.
        """
        self._of.clear()
        self._homeless.clear()
        self.turn = layout["turn"]
        for number, told in enumerate(layout["units"]):
            unit = Unit([Member(*member) for member in told["members"]], self.codec, self.turn)
            shared = unit.memory.shared
            if same_codec:
                shared.vectors = _by_place(
                    (*place, as_array(vector.detach().cpu()).copy()) for *place, vector in told["vectors"]
                )
            for state in summed:
                theirs = state["units"][number]
                for name, array in unit.memory.arrays.items():
                    if name in theirs["kept"] and own:
                        array[...] = as_array(theirs["kept"][name].detach().cpu())
                    elif name in theirs["kept"]:
                        array += as_array(theirs["kept"][name].detach().cpu()) * np.float32(factor)
                if same_codec and own:
                    shared.numbers = _by_place(theirs["numbers"])
            for place in unit.places:
                self._of[place] = unit


def _by_place(listed: Any) -> dict[Place, Any]:
    return {(name, begin, end): one for name, begin, end, one in listed}
