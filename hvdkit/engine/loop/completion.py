"""Completion of operations in flight: threads wait for it, and callbacks run at it."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from time import monotonic
from typing import TYPE_CHECKING, Any

from hvdkit.errors import HorovodInternalError, StallError

if TYPE_CHECKING:
    from hvdkit.engine.loop.waiting import WaitingThreads


HALT_SECONDS = 5.0  # a round that takes longer is stuck in a library


class Completion:
    """The end of an operation in flight. Callbacks run on the thread that ends it, without a caller that waits."""

    def __init__(self, waiting: WaitingThreads) -> None:
        self._waiting = waiting
        self._lock = Lock()
        self._callbacks: list[Callable[[Any], None]] = []
        self.is_over = False
        self.error: HorovodInternalError | None = None
        self.since = monotonic()

    def done(self) -> bool:
        """True when ``wait`` returns at once."""
        return self.is_over

    def wait(self, seconds: float | None = None) -> None:
        """Wait until the operation is done. Raises its error, or StallError after ``seconds``."""
        if not self.is_over:
            until = None if seconds is None else monotonic() + seconds
            self._waiting.wait(self, lambda: self.is_over or (until is not None and monotonic() > until))
            if not self.is_over:
                with self._waiting.driver.halted(HALT_SECONDS):  # a look at the peers would move it on
                    stalled = self.stalled(seconds or 0.0)
                raise StallError(stalled)
        if self.error is not None:
            raise self.error

    def stalled(self, seconds: float) -> str:
        """Return why the operation is not done after ``seconds``, for an error."""
        raise NotImplementedError

    def call_when_done(self, callback: Callable[[Any], None]) -> None:
        """Call ``callback`` once the operation is done, at once if it is."""
        with self._lock:
            if not self.is_over:
                self._callbacks.append(callback)
                return
        callback(self)

    def end(self, error: HorovodInternalError | None) -> None:
        """Note that the operation is done, or has failed. Only the first call has an effect."""
        with self._lock:
            if self.is_over:
                return
            self.error, self.is_over = error, True
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(self)
