"""Threads that wait for blocking calls, started when needed, reused, and never in the way of the process's exit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from time import monotonic
from typing import Generic, TypeVar

T = TypeVar("T")


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
            del job  # what it holds is not needed while this thread waits
            with self._lock:
                self._idle += 1


class Call(Generic[T]):
    """A call that has no time limit of its own, on a thread that waits for it to be due.

    The thread is there before: where the interpreter ends, Python 3.12 and later start none.
    """

    def __init__(self, action: Callable[[], T], name: str) -> None:
        self._due, self._done = threading.Event(), threading.Event()
        self._results: list[T] = []
        self._error: BaseException | None = None

        def run() -> None:
            self._due.wait()
            try:
                self._results.append(action())
            except BaseException as error:  # raised by ``result``
                self._error = error
            self._done.set()

        threading.Thread(target=run, name=name, daemon=True).start()

    def within(self, seconds: float) -> bool:
        """Make the call. Whether it came back in time; else it is left behind."""
        self._due.set()
        return self._done.wait(seconds)

    def result(self) -> T:
        """What came of the call that has come back. Raises what it raised."""
        if self._error is not None:
            raise self._error
        return self._results[0]
