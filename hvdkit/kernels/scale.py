"""What happens to a reduction at its end: times a factor, divided by a whole number."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

# So that every divisor is exact in float32.
LARGEST_DIVISOR = 2**24


class Scale(NamedTuple):
    """``factor * x / divisor``; an average is a sum with the number of ranks as its divisor.

    Without a factor the sum is divided, in its own arithmetic (halves: float32), and rounded once; integers toward
    zero, exactly. A reciprocal would not do: 1/3 cannot be written as a float, and 49 * (1 / 49) is less than one.

    A factor other than one is Horovod's: ``factor / divisor``, computed in float64, is rounded to the type of the
    arithmetic, and the sum is multiplied by that number. So ``x * factor`` in the tensor's type has the same bits.
    Integers are multiplied by the factor and divided in float64, then cut off.

    Horovod multiplies averages without a factor as well, by the rounded reciprocal. For a power of two ranks the bits
    are the same; for other numbers a float may differ in its last bit, and an integer average of Horovod's may be one
    too small.
    """

    factor: float = 1.0
    divisor: int = 1  # 1 to LARGEST_DIVISOR

    @property
    def number(self) -> float:
        """The one number that is nearest to it, for estimates and bookkeeping."""
        return self.factor / self.divisor

    def as_factor(self) -> float | None:
        """Return the float32 by which float32 values are multiplied; None where they are divided."""
        if self.factor == 1.0 and self.divisor & (self.divisor - 1):
            return None
        with np.errstate(over="ignore"):
            return float(np.float32(self.number))


ONE = Scale()
