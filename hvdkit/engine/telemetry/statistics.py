"""What communication cost this rank so far: bytes, reductions, seconds."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace

from hvdkit.compression import Tally


@dataclass(frozen=True)
class CommunicationStatistics:
    """Totals since ``hvd.init()``."""

    bytes_sent: int  # payload bytes that this rank sent
    reductions: int  # fused reductions that were carried out
    reduced_bytes: int  # bytes of gradients and tensors in them
    seconds: float  # wall seconds in which a training thread of this rank waited for communication
    busy_seconds: float  # wall seconds, summed over reductions, from start to end; they overlap


class Statistics:
    """Counts while the engine runs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reductions = 0
        self._reduced_bytes = 0
        self._busy = 0.0
        self._waited = 0.0
        self._encoded: dict[str, Tally] = {}

    def reduced(self, nbytes: int, seconds: float) -> None:
        with self._lock:
            self._reductions += 1
            self._reduced_bytes += nbytes
            self._busy += seconds

    def encoded(self, codec: str, tally: Tally) -> None:
        """An operation by name was encoded."""
        with self._lock:
            self._encoded.setdefault(codec, Tally()).add(tally)

    def encoded_by_name(self) -> dict[str, Tally]:
        """What operations by name have cost and saved, by codec."""
        with self._lock:
            return {codec: replace(tally) for codec, tally in self._encoded.items()}

    def waited(self, seconds: float) -> None:
        with self._lock:
            self._waited += seconds

    def totals(self, bytes_sent: int) -> CommunicationStatistics:
        with self._lock:
            return CommunicationStatistics(bytes_sent, self._reductions, self._reduced_bytes, self._waited, self._busy)
