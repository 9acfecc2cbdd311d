"""Threads that wait for blocking calls, started when needed, reused, and never in the way of the process's exit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from time import monotonic


class Waiters:
    """Runs each job at once on a daemon thread. Unlike an executor it has no bound, so no job waits for another."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0
        self._threads: list[threading.Thread] = []

    def run(self, job: Callable[[], None]) -> None:
        """Run ``job``, which must not raise, on a thread that is idle, else on a new one."""
        with self._lock:
            if self._idle > 0:
                self._idle -= 1
            else:
                name = f"{self._name}-{len(self._threads)}"
                thread = threading.Thread(target=self._serve, name=name, daemon=True)
                thread.start()  # raises where the interpreter ends: then there is none to wait for
                self._threads.append(thread)
        self._jobs.put(job)

    def close(self, timeout_seconds: float) -> None:
        """Let every thread end after its present job, and wait for that up to the timeout."""
        for _ in self._threads:
            self._jobs.put(None)
        deadline = monotonic() + timeout_seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - monotonic()))

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            with self._lock:
                self._idle += 1
