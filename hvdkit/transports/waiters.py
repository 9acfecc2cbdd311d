"""Threads that wait for blocking calls, started when needed, reused, and never in the way of the process's exit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue


class Waiters:
    """Runs each job at once on a daemon thread. Unlike an executor it has no bound, so no job waits for another."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0
        self._started = 0

    def run(self, job: Callable[[], None]) -> None:
        """Run ``job``, which must not raise, on a thread that is idle, else on a new one."""
        with self._lock:
            if self._idle > 0:
                self._idle -= 1
            else:
                self._started += 1
                threading.Thread(target=self._serve, name=f"{self._name}-{self._started}", daemon=True).start()
        self._jobs.put(job)

    def close(self) -> None:
        """Let every thread end after its present job."""
        for _ in range(self._started):
            self._jobs.put(None)

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            with self._lock:
                self._idle += 1
