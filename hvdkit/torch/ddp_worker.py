"""A thread that reduces buckets one after the other, and ends with its owner or with the process."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue

Job = Callable[[], None]
# What a job that is under way when the process ends gets to finish in, and then to fail in.
FINISH_SECONDS, FAIL_SECONDS = 0.2, 2.0


class Worker:
    """Runs jobs on a daemon thread in the order in which they were given.

    When ``owner`` is gone, or the process ends, so does the thread; a job that is then under way is made to fail by
    ``interrupt``, which holds no reference to the owner.
    """

    def __init__(self, owner: object, interrupt: Callable[[], None]) -> None:
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._thread = threading.Thread(target=_serve, args=(self._jobs,), name="hvdkit-ddp-hook", daemon=True)
        self._thread.start()
        weakref.finalize(owner, _end, self._jobs, self._thread, interrupt)

    def run(self, job: Job) -> None:
        """Have ``job``, which must not raise, run after those that were given before."""
        self._jobs.put(job)


def _serve(jobs: SimpleQueue[Job | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # it may hold the last reference to the owner, which would otherwise wait for the next job


def _end(jobs: SimpleQueue[Job | None], thread: threading.Thread, interrupt: Callable[[], None]) -> None:
    jobs.put(None)
    if thread is threading.current_thread():
        return
    thread.join(FINISH_SECONDS)
    if thread.is_alive():
        # A thread that comes back from C++ when Python is gone can take the process down with it.
        interrupt()
        thread.join(FAIL_SECONDS)
