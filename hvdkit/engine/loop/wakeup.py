"""Sleep of the threads that drive the engine: a counter of rings, so that none since the last look is missed."""

from __future__ import annotations

import threading
from typing import Protocol


class Wakeup(Protocol):
    """A counter of rings. Read ``count``, look for work, then ``sleep`` with that count: a ring since then ends it.

    ``spin_seconds``: how long to watch for a ring before giving up the processor.
    """

    def count(self) -> int: ...

    def ring(self) -> None: ...

    def sleep(self, seen: int, seconds: float, spin_seconds: float = 0.0) -> None: ...


class ThreadWakeup:
    """A wake-up for the threads of this process, where the native one was not compiled."""

    def __init__(self) -> None:
        self._rings = 0
        self._rung = threading.Condition()

    def count(self) -> int:
        return self._rings

    def ring(self) -> None:
        with self._rung:
            self._rings += 1
            self._rung.notify_all()

    def sleep(self, seen: int, seconds: float, spin_seconds: float = 0.0) -> None:
        with self._rung:
            self._rung.wait_for(lambda: self._rings != seen, seconds)


def new_wakeup() -> Wakeup:
    """Return a wake-up for the threads of this process."""
    try:
        from hvdkit.kernels._native import Bell
    except ImportError:
        return ThreadWakeup()
    return Bell()
