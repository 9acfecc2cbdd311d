"""Memory for results that comes back when the last tensor on it goes: fresh pages cost more than the allreduce."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

# Sizes are rounded up to this, so that tensors of about one size share memory one after the other.
STEP_BYTES = 1 << 21
# What is kept at most, in multiples of the largest result so far: one is still in use while the next one is made.
KEPT_RESULTS = 2


class ResultMemory:
    """Lends flat bytes. What nobody uses any more is kept for the next of its size; sizes unused longest go first."""

    def __init__(self) -> None:
        # No locks: memory comes back from wherever the last reference is dropped, perhaps inside of take(). Each
        # single operation on these is atomic.
        self._free: dict[int, list[Bytes]] = {}  # by size, the one used last at the end
        self._largest = 0

    def take(self, nbytes: int) -> Bytes:
        """``nbytes`` bytes with any content, the caller's for as long as something refers to them."""
        size = -(-nbytes // STEP_BYTES) * STEP_BYTES
        self._largest = max(self._largest, size)
        try:
            memory = self._free[size].pop()
        except (KeyError, IndexError):
            # numpy asks the system for huge pages, torch does not.
            memory = np.empty(size, dtype=np.uint8)
        lent = memory[:nbytes]
        weakref.finalize(lent, self._give_back, memory).atexit = False
        return lent

    def _give_back(self, memory: Any) -> None:
        held = self._free.pop(memory.nbytes, [])
        held.append(memory)
        self._free[memory.nbytes] = held
        for size, unused in list(self._free.items()):
            while unused and self.kept() > KEPT_RESULTS * self._largest:
                del unused[:1]
            if not unused:
                self._free.pop(size, None)

    def kept(self) -> int:
        """Bytes that are held for later."""
        return sum(size * len(held) for size, held in list(self._free.items()))


RESULTS = ResultMemory()
