"""Who drives the engine: a background thread, or a thread that waits for a result and has nothing better to do."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter

from hvdkit.engine.signal import Signal

SHORTEST_PAUSE = 50e-6
# An event-driven transport wakes its driver; the timeout only bounds how late a time-out is noticed.
EVENT_PAUSE, EVENT_IDLE_PAUSE = 0.05, 0.5


class Driver:
    """Calls ``round_`` (one pass over everything in flight; True if anything moved) from one thread at a time."""

    def __init__(
        self,
        round_: Callable[[], bool],
        busy: Callable[[], bool],
        polling: bool,
        spin_seconds: float,
        longest_pause: float,
        idle_pause: float,
    ) -> None:
        self._round = round_
        self._busy = busy
        self._polling = polling
        self._spin = spin_seconds if polling else 0.0
        self._longest_pause = max(longest_pause, SHORTEST_PAUSE)
        self._idle_pause = idle_pause
        self._turn = threading.Lock()  # held during a round
        self._guests: tuple[Signal, ...] = ()  # of the threads that wait for something and drive meanwhile
        self._guests_lock = threading.Lock()
        self._background_signal = Signal()
        self._stopping = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the background thread."""
        self._thread = threading.Thread(target=self._serve, name="hvdkit-engine", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the background thread after its present round."""
        self._stopping = True
        self._background_signal.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def wake(self) -> None:
        """Something has come in or was submitted."""
        guests = self._guests
        for guest in guests:
            guest.set()
        if not guests:
            self._background_signal.set()

    @contextmanager
    def halted(self, seconds: float) -> Iterator[bool]:
        """No round runs inside this block. Yields False where a round that is stuck could not be waited out."""
        mine = self._turn.acquire(timeout=seconds)
        try:
            yield mine
        finally:
            if mine:
                self._turn.release()

    def drive_until(self, finished: Callable[[], bool]) -> float:
        """Drive from the calling thread until ``finished()``. Returns the seconds that it took."""
        started = perf_counter()
        signal = Signal()
        with self._guests_lock:
            self._guests = (*self._guests, signal)
        try:
            moved_at = perf_counter()
            pause = SHORTEST_PAUSE
            while not finished():
                if not self._turn.acquire(timeout=0.001):
                    continue
                try:
                    moved = self._round()
                finally:
                    self._turn.release()
                if moved:
                    moved_at, pause = perf_counter(), SHORTEST_PAUSE
                    if len(self._guests) > 1:
                        self.wake()  # it may have been what another thread waits for
                elif not self._polling:
                    signal.wait(EVENT_PAUSE)
                elif perf_counter() - moved_at > self._spin:
                    signal.wait(pause)
                    pause = min(2 * pause, self._longest_pause)
        finally:
            with self._guests_lock:
                self._guests = tuple(guest for guest in self._guests if guest is not signal)
            if self._busy():
                self.wake()
        return perf_counter() - started

    def _serve(self) -> None:
        pause = SHORTEST_PAUSE
        while not self._stopping:
            if self._guests:
                self._background_signal.wait(0.1)  # a guest drives, and wakes us when it goes with work left
                continue
            if not self._turn.acquire(timeout=0.1):
                continue
            try:
                moved = self._round()
            finally:
                self._turn.release()
            if moved:
                pause = SHORTEST_PAUSE
            elif not self._busy():
                self._background_signal.wait(self._idle_pause if self._polling else EVENT_IDLE_PAUSE)
                pause = SHORTEST_PAUSE
            elif self._polling:
                self._background_signal.wait(pause)
                pause = min(2 * pause, self._longest_pause)
            else:
                self._background_signal.wait(EVENT_PAUSE)
