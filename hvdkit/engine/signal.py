"""A flag that one thread sleeps on and any other sets: a lock used as a semaphore, cheaper than threading.Event."""

from __future__ import annotations

import contextlib
import threading


class Signal:
    """``wait`` returns when ``set`` was called since the last ``wait``, or after the timeout."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        # Two threads may set it at once; the second finds it set already.
        with contextlib.suppress(RuntimeError):
            self._lock.release()

    def wait(self, seconds: float) -> None:
        self._lock.acquire(timeout=seconds)
