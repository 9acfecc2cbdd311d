"""What happens to a reduction at its end: times a factor, divided by a whole number."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

# So that every divisor is exact in float64.
LARGEST_DIVISOR = 2**31 - 1


class Scale(NamedTuple):
    """``factor * x / divisor``; an average is a sum with the number of ranks as its divisor.

    A number and its reciprocal are not the same: 1/3 cannot be written as a float, and 49 * (1 / 49) is less than one.
    So the sum is divided, in its own arithmetic (halves: float32), and rounded once; integers toward zero, exactly. A
    factor other than one is multiplied in float64, then comes the division there, and the result is rounded to the
    dtype.
    """

    factor: float = 1.0
    divisor: int = 1  # 1 to LARGEST_DIVISOR

    @property
    def number(self) -> float:
        """The one number that is nearest to it, for estimates and bookkeeping."""
        return self.factor / self.divisor

    def as_factor(self) -> float | None:
        """A number that gives the same bits if float32 values are multiplied with it; None if there is none."""
        number = self.number
        halvings = self.divisor & (self.divisor - 1) == 0 and number * self.divisor == self.factor
        return number if halvings and float(np.float32(number)) == number else None


ONE = Scale()
