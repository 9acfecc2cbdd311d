"""Where threads that drive the engine sleep: an event counter, so that nothing rung since one looked is missed."""

from __future__ import annotations

import threading
from typing import Protocol


class Wakeup(Protocol):
    """Read ``count``, look for work, and ``sleep`` with that count: a ring in between ends the sleep at once.

    ``spin_seconds``: for how long to watch for one before giving up the processor.
    """

    def count(self) -> int: ...

    def ring(self) -> None: ...

    def sleep(self, seen: int, seconds: float, spin_seconds: float = 0.0) -> None: ...


class ThreadWakeup:
    """For the threads of one process, where the native one was not compiled."""

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
    """For the threads of this process."""
    try:
        from hvdkit.kernels._native import Bell
    except ImportError:
        return ThreadWakeup()
    return Bell()
