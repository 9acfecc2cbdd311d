"""Reductions, with Horovod's numbers, and the scale of their results."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import numpy as np

# So that every divisor is exact in float32.
LARGEST_DIVISOR = 2**24


class ReduceOp(IntEnum):
    """Reductions of the tensors of several ranks. AVERAGE is SUM with a scale; ADASUM is an algorithm, not a kernel."""

    AVERAGE = 0
    SUM = 1
    ADASUM = 2
    MIN = 3
    MAX = 4
    PRODUCT = 5


class Scale(NamedTuple):
    """``factor * x / divisor``; an average is a sum with the number of ranks as its divisor.

    With factor 1 the sum is divided in its own arithmetic (halves: float32) and rounded once; integers exactly, toward
    zero. Horovod multiplies by the rounded reciprocal: for a power of two ranks the bits are the same; otherwise a
    float may differ in its last bit, and an integer average of Horovod's may be too small by 1.

    Another factor is applied as Horovod does: ``factor / divisor``, computed in float64, is rounded to the type of the
    arithmetic, and the sum is multiplied by it. So ``x * factor`` in the tensor's type has the same bits. Integers are
    multiplied by the factor and divided in float64, then cut off.
    """

    factor: float = 1.0
    divisor: int = 1  # 1 to LARGEST_DIVISOR

    @property
    def number(self) -> float:
        """The nearest float, for estimates and bookkeeping."""
        return self.factor / self.divisor

    def as_factor(self) -> float | None:
        """Return the float32 by which float32 values are multiplied; None where they are divided."""
        if self.factor == 1.0 and self.divisor & (self.divisor - 1):
            return None
        with np.errstate(over="ignore"):
            return float(np.float32(self.number))


ONE = Scale()
