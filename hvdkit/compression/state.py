"""State that a codec keeps from one step to the next: arrays as long as the gradients, and a few numbers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from hvdkit.kernels.dtypes import Array

RESIDUAL = "residual"  # of error feedback: what this rank did not send yet
OWED = "owed"  # is added once to this rank's next gradient: the residual of another place
TURN = "turn"
# Of a number or vector: its name, and its elements (begin, end) counted from the start of the bucket.
Key = tuple[str, int, int]


@dataclass
class Tally:
    """The cost and gain of compression on this rank: bytes before and after encoding, seconds."""

    bytes_before: float = 0.0
    bytes_after: float = 0.0
    encode_seconds: float = 0.0
    decode_seconds: float = 0.0

    def add(self, other: Tally, part: float = 1.0) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + part * value)


@dataclass
class CommonState:
    """The state that all parts of a bucket have in common."""

    turn: int = 0  # of elements that have no number of their own
    numbers: dict[Key, float] = field(default_factory=dict)
    vectors: dict[Key, Array] = field(default_factory=dict)
    matrices: list[tuple[int, int, int]] = field(default_factory=list)  # where each tensor begins, its rows and columns


class CodecState:
    """The state of ``elements`` elements of a bucket. ``kinds`` names its arrays: float32, zeros at first."""

    def __init__(self, elements: int, kinds: Iterable[str] = ()) -> None:
        self.elements = elements
        self.arrays: dict[str, Array] = {kind: np.zeros(elements, dtype=np.float32) for kind in kinds}
        self.begin = 0
        self.turn = 0  # how often these elements were reduced before
        self.salt = 0  # a number of the rank and of the phase, so that each draws its own random numbers
        self.shared = CommonState()
        self.tally = Tally()  # of these elements; parts count in it as well

    def part(self, begin: int, end: int) -> CodecState:
        """Return the state of the elements from ``begin`` to ``end`` of this one, in the same arrays."""
        part = CodecState.__new__(CodecState)
        vars(part).update(vars(self), elements=end - begin, begin=self.begin + begin)
        # A copy of the items, since another thread may pay what is owed meanwhile.
        part.arrays = {kind: array[begin:end] for kind, array in [*self.arrays.items()]}
        return part

    @property
    def residual(self) -> Array | None:
        return self.arrays.get(RESIDUAL)

    def matrices(self) -> list[tuple[int, int, int]]:
        """Return the begin, the rows and the columns of each tensor among these elements."""
        end = self.begin + self.elements
        return [(at - self.begin, rows, cols) for at, rows, cols in self.shared.matrices if self.begin <= at < end]

    def recall(self, name: str) -> float | None:
        return self.shared.numbers.get((name, self.begin, self.begin + self.elements))

    def keep(self, name: str, number: float) -> None:
        self.shared.numbers[name, self.begin, self.begin + self.elements] = number
