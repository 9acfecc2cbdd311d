"""What a codec keeps of a run of gradients from one step to the next: arrays as long as the run, and a few numbers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from hvdkit.kernels.dtypes import Array

# The residual of error feedback: what a rank owes to the sum because it was not sent yet.
RESIDUAL = "residual"
# What is added once to this rank's next gradient: of what was kept elsewhere.
OWED = "owed"
TURN = "turn"
# Of what is remembered: its name, and the elements (begin, end) counted from the start of the memory.
Key = tuple[str, int, int]


@dataclass
class Tally:
    """What compressing cost and saved on this rank: bytes as they were and as they travelled, seconds."""

    bytes_before: float = 0.0
    bytes_after: float = 0.0
    encode_seconds: float = 0.0
    decode_seconds: float = 0.0

    def add(self, other: Tally, part: float = 1.0) -> None:
        """Count a part of what ``other`` counted."""
        self.bytes_before += part * other.bytes_before
        self.bytes_after += part * other.bytes_after
        self.encode_seconds += part * other.encode_seconds
        self.decode_seconds += part * other.decode_seconds


@dataclass
class Shared:
    """What all parts of a memory have in common."""

    turn: int = 0  # of elements that have no number of their own
    numbers: dict[Key, float] = field(default_factory=dict)
    vectors: dict[Key, Array] = field(default_factory=dict)
    matrices: list[tuple[int, int, int]] = field(default_factory=list)  # where each tensor begins, its rows and columns


class Memory:
    """The memory of ``elements`` elements, or of a part of them.

    ``keeps`` names its arrays: float32, zeros at first, so that pages which nobody writes take no memory.
    """

    def __init__(self, elements: int, keeps: Iterable[str] = ()) -> None:
        self.elements = elements
        self.arrays: dict[str, Array] = {name: np.zeros(elements, dtype=np.float32) for name in keeps}
        self.begin = 0
        self.turn = 0  # how often these elements were reduced before
        self.salt = 0  # a number of the rank and of the phase, for what shall be random in each of them
        self.shared = Shared()
        self.tally = Tally()  # of what is done with these elements; parts count in it as well

    def part(self, begin: int, end: int) -> Memory:
        """The memory of the elements from ``begin`` to ``end`` of this one; they are the same arrays."""
        part = Memory.__new__(Memory)
        vars(part).update(vars(self), elements=end - begin, begin=self.begin + begin)
        part.arrays = {name: array[begin:end] for name, array in [*self.arrays.items()]}  # a debt may be paid meanwhile
        return part

    @property
    def residual(self) -> Array | None:
        """The residual of these elements; None for a codec without feedback."""
        return self.arrays.get(RESIDUAL)

    def matrices(self) -> list[tuple[int, int, int]]:
        """Where each tensor among these elements begins, its rows and its columns."""
        end = self.begin + self.elements
        return [(at - self.begin, rows, cols) for at, rows, cols in self.shared.matrices if self.begin <= at < end]

    def recall(self, name: str) -> float | None:
        """A number that was kept for exactly these elements."""
        return self.shared.numbers.get((name, self.begin, self.begin + self.elements))

    def keep(self, name: str, number: float) -> None:
        """Keep a number for these elements."""
        self.shared.numbers[name, self.begin, self.begin + self.elements] = number
