"""The threads that drive the engine: a background thread, or a thread that waits for a result meanwhile."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import TYPE_CHECKING

from hvdkit.config import Settings
from hvdkit.engine.ranks.topology import Topology
from hvdkit.engine.telemetry.telemetry import Statistics
from hvdkit.transports.base import Transport

if TYPE_CHECKING:
    from hvdkit.engine.session.rounds import Rounds
    from hvdkit.kernels._native import Bell

# No thread waits for the background thread, whose rounds take time from the computation: 1 % at 10 Gb/s.
SHORTEST_PAUSE, BACKGROUND_PAUSE = 50e-6, 300e-6
# After a shorter wait a thread does not wake the background thread, which wakes by itself: that would cost as much.
SHORT_VISIT = 0.004
# An event-driven transport wakes its driver; the timeout only bounds how late a time-out is noticed.
EVENT_PAUSE, EVENT_IDLE_PAUSE = 0.05, 0.5
ROUND_SECONDS = 30.0  # for which ``stop`` waits for a round; only one that is stuck in a library takes longer


def usable_cores() -> list[int]:
    """Return the numbers of the cores that this process may run on."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def spin_seconds(seconds: float, transport: Transport, topology: Topology) -> float:
    """Return for how long a waiting thread may keep its core: ``seconds``, or 0 where ranks share cores."""
    if not (transport.polling or transport.wakeup is not None):
        return 0.0  # events come from threads of this process, which need the core
    return seconds if topology.has_core_each else 0.0


class ThreadWakeup:
    """A counter of rings on which threads of this process sleep, where the native Bell was not compiled.

    Read ``count``, look for work, then ``sleep`` with that count: a ring since then ends the sleep.
    """

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


def new_wakeup() -> Bell | ThreadWakeup:
    """Return a wake-up for the threads of this process."""
    try:
        from hvdkit.kernels._native import Bell
    except ImportError:
        return ThreadWakeup()
    return Bell()


class Driver:
    """Runs the rounds of the engine, from one thread at a time. A rank alone has no background thread."""

    def __init__(self, transport: Transport, spin_seconds: float, settings: Settings, statistics: Statistics) -> None:
        self.inbox: deque[Callable[[], None]] = deque()  # done at the start of the next round; any thread may append
        self.looks_at_once = transport.size == 1
        self._statistics = statistics
        self._rounds: Rounds | None = None
        self._wakeup = transport.wakeup or new_wakeup()  # rung by threads of this rank and by ranks of its node
        self._polling, self._spin = transport.polling, spin_seconds
        self._longest_pause = max(settings.cycle_time_ms * 1e-3, SHORTEST_PAUSE)
        self._background_pause = min(BACKGROUND_PAUSE, self._longest_pause)
        self._idle_pause = settings.idle_poll_ms * 1e-3
        self._turn = threading.Lock()  # held during a round
        self._guests, self._guest_since = 0, 0.0  # threads that wait for something and drive meanwhile
        self._guests_lock = threading.Lock()
        self._last_guest_left = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._serve, name="hvdkit-engine", daemon=True)

    def start(self, rounds: Rounds) -> None:
        """Drive ``rounds`` from now on."""
        self._rounds = rounds
        if not self.looks_at_once:
            self._thread.start()

    def stop(self) -> None:
        """End the background thread after its present round, or leave it behind where that does not end."""
        self._stopping = True
        self._last_guest_left.set()
        self._wakeup.ring()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(ROUND_SECONDS)

    def wake(self) -> None:
        """Have a round run soon: by the background thread, or by the calling thread if there is none."""
        if self.looks_at_once:
            self.drive_until(lambda: not self.inbox)
        else:
            self._wakeup.ring()

    def visit(self) -> None:
        """Run a round on the calling thread, or have the background thread run one if a round is under way."""
        if not self._turn.acquire(blocking=False):
            self.wake()
            return
        try:
            assert self._rounds is not None
            self._rounds.run()
        finally:
            self._turn.release()

    def defer(self, action: Callable[[], None]) -> None:
        """Have the next round call ``action``."""
        self.inbox.append(action)
        self.wake()

    @contextlib.contextmanager
    def halted(self, seconds: float) -> Iterator[bool]:
        """Keep rounds from running inside this block. Yields False if a round is stuck for longer than ``seconds``."""
        acquired = self._turn.acquire(timeout=seconds)
        try:
            yield acquired
        finally:
            if acquired:
                self._turn.release()

    def drive_until(self, finished: Callable[[], bool]) -> None:
        """Drive from the calling thread until ``finished()``."""
        rounds, started = self._rounds, perf_counter()
        assert rounds is not None
        with self._guests_lock:
            self._guests += 1
            self._guest_since = started
        try:
            moved_at = perf_counter()
            pause = SHORTEST_PAUSE
            while not finished():
                if not self._turn.acquire(timeout=0.001):
                    continue
                try:
                    seen = self._wakeup.count()
                    moved = rounds.run()
                finally:
                    self._turn.release()
                if moved:
                    moved_at, pause = perf_counter(), SHORTEST_PAUSE
                    if self._guests > 1:
                        self._wakeup.ring()  # it may have been what another thread waits for
                elif not self._polling:
                    if not finished():  # in that round, without anything that counts as moving
                        self._wakeup.sleep(seen, EVENT_PAUSE, self._spin)
                elif perf_counter() - moved_at > self._spin:
                    self._wakeup.sleep(seen, pause)
                    pause = min(2 * pause, self._longest_pause)
        finally:
            with self._guests_lock:
                self._guests -= 1
            seconds = perf_counter() - started
            if seconds > SHORT_VISIT or rounds.busy():
                self._last_guest_left.set()
        self._statistics.waited(seconds)

    def _serve(self) -> None:
        rounds, pause = self._rounds, self._background_pause
        assert rounds is not None
        while not self._stopping:
            if self._guests:  # they drive
                young = perf_counter() - self._guest_since < SHORT_VISIT
                self._last_guest_left.wait(SHORT_VISIT / 4 if young else 0.1)
                self._last_guest_left.clear()
                continue
            if not self._turn.acquire(timeout=0.1):
                continue
            try:
                seen = self._wakeup.count()
                moved = rounds.run()
            finally:
                self._turn.release()
            if moved:
                pause = self._background_pause
            elif not rounds.busy():
                self._wakeup.sleep(seen, self._idle_pause if self._polling else EVENT_IDLE_PAUSE)
                pause = self._background_pause
            elif self._polling:
                self._wakeup.sleep(seen, pause)
                pause = min(2 * pause, self._longest_pause)
            else:
                self._wakeup.sleep(seen, EVENT_PAUSE)
