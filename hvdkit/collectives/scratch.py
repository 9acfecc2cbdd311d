"""Scratch memory that is reused: fresh pages cost more than the pass over them."""

from __future__ import annotations

import threading
from collections import defaultdict

from hvdkit.transports.base import Bytes, aligned_empty

SMALLEST = 4096
KEPT_BYTES = 64 * 1024 * 1024


class Scratch:
    """A lender of flat byte buffers in sizes of powers of two, which keeps at most ``KEPT_BYTES`` that come back."""

    def __init__(self) -> None:
        self._free: dict[int, list[Bytes]] = defaultdict(list)
        self._kept = 0
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> Bytes:
        """Return a buffer of at least ``nbytes`` bytes, for the caller to slice, and to give back as a whole."""
        size = max(SMALLEST, 1 << max(0, nbytes - 1).bit_length())
        with self._lock:
            if self._free[size]:
                self._kept -= size
                return self._free[size].pop()
        return aligned_empty(size)

    def give_back(self, buffer: Bytes) -> None:
        """Take a buffer back."""
        with self._lock:
            if self._kept + buffer.nbytes <= KEPT_BYTES:
                self._kept += buffer.nbytes
                self._free[buffer.nbytes].append(buffer)


SCRATCH = Scratch()
