"""PowerSGD: a matrix of gradients as the product of two thin ones.

Vogels et al., 2019, "PowerSGD: practical low-rank gradient compression for distributed optimization".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from hvdkit.compression.checks import check_integer, check_seed
from hvdkit.compression.codec import Array
from hvdkit.compression.memory import Memory, Place
from hvdkit.compression.payload import LossyCodec

RIGHT = "right"


@dataclass(frozen=True)
class PowerSGD(LossyCodec):
    """The product of ``rank`` vectors as long as a column and as many as long as a row, by one step of power iteration.

    A tensor is a matrix whose rows are its first dimension. All of a bucket's tensors travel together: first what each
    matrix is on the vectors of the step before (warm start), then, those made orthonormal, what it is on these. Both
    are plain sums. Tensors that this does not make smaller travel as they are, with the first.
    """

    rank: int = 4
    seed: int = 0

    name: ClassVar[str] = "powersgd"
    whole_tensors: ClassVar[bool] = True

    @property
    def on_device(self) -> bool:
        """See LossyCodec."""
        return type(self) is PowerSGD

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer(self.name, "rank", self.rank, 1, 1024)
        check_seed(self.name, self.seed)

    def vectors(self, rows: int, cols: int) -> int:
        """How many vectors stand for a matrix; 0 where they would not be smaller."""
        return self.rank if self.rank * (rows + cols) < rows * cols else 0

    def sent_elements(self, matrices: list[tuple[int, int, int]]) -> tuple[int, int]:
        """How many numbers travel the first and the second time."""
        first = second = 0
        for _, rows, cols in matrices:
            count = self.vectors(rows, cols)
            first += count * rows if count else rows * cols
            second += count * cols
        return first, second

    def start(self, memory: Memory, begin: int, rows: int, cols: int) -> Array:
        """The vectors as long as a row to begin with: the last step's; random ones, alike on all ranks, for zeros."""
        count = self.vectors(rows, cols)
        kept = memory.shared.vectors.get(self.place(memory, begin, rows, cols))
        right = np.zeros(count * cols, dtype=np.float32) if kept is None else kept
        for k, vector in enumerate(right.reshape(count, cols)):
            if not vector.any():
                drawn = np.random.Philox(key=self.seed, counter=[memory.turn, memory.begin + begin, k, 0])
                vector[...] = np.random.Generator(drawn).random(cols) - 0.5
        return right

    @staticmethod
    def place(memory: Memory, begin: int, rows: int, cols: int) -> Place:
        """Where the vectors of a matrix are kept."""
        return RIGHT, memory.begin + begin, memory.begin + begin + rows * cols
