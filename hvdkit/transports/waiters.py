"""Blocking calls of libraries: daemon threads that wait in them, and deadlines for calls that have none.

Gloo tells that a transfer is complete only to a thread that waits for that transfer. Each connection mostly completes
transfers in the order in which they were posted, so a single thread that waits for one after the other sees each
completion in time, at a fraction of the switches between threads. But a peer may post the awaited transfer only after
this rank has seen a later one complete: ``Waiters.relieve`` gives a thread to each queued call while none returns.
"""

from __future__ import annotations

import faulthandler
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from time import monotonic
from typing import Generic, TypeVar

T = TypeVar("T")
Wait = Callable[[], None]

STANDARD_ERROR = 2  # sys.stderr may be no file, as in a notebook
LONGEST_SECONDS = 1e6  # faulthandler takes no more
# More for the store of torch.distributed, which breaks its deadlines while the rank that serves it is stopped.
LONGEST_ANSWER_SECONDS = 2.0
STOPPED = "HINT: see whether the process at the other end was stopped, and whether its host can still be reached."

CALLS_IN_TURN = 1
STUCK_SECONDS = 0.1
MOST_IDLE = 4  # idle threads that stay; further ones end


class Waiters:
    """A pool of threads, each in one blocking call. The calls must not raise."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: SimpleQueue[Wait | None] = SimpleQueue()  # for idle threads; None ends a thread
        self._lock = threading.Lock()
        self._started = self._idle = 0
        self._threads: set[threading.Thread] = set()
        self._queue: deque[Wait] = deque()  # calls for which it is not yet the turn
        self._in_turn = 0  # threads that take turns
        self._turn_began = 0.0

    def run(self, call: Wait) -> None:
        """Make ``call`` at once, on an idle thread or on a new one."""
        with self._lock:
            if self._idle > 0:
                self._idle -= 1
            else:
                thread = threading.Thread(target=self._serve, name=f"{self._name}-{self._started}", daemon=True)
                thread.start()  # raises while the interpreter ends; then no thread has to be joined
                self._threads.add(thread)
                self._started += 1
        self._calls.put(call)

    def run_in_turn(self, call: Wait) -> None:
        """Make ``call`` behind earlier ones, ``CALLS_IN_TURN`` at a time; at once while earlier ones are stuck."""
        with self._lock:
            if self._in_turn == CALLS_IN_TURN:
                self._queue.append(call)
                return
            self._in_turn += 1
            self._turn_began = monotonic()
        self.run(partial(self._take_turns, call))

    def relieve(self) -> None:
        """Make the queued calls at once if no turn has begun for ``STUCK_SECONDS``. Call this periodically."""
        if not self._queue or monotonic() - self._turn_began < STUCK_SECONDS:
            return
        with self._lock:
            calls = list(self._queue)
            self._queue.clear()
            self._in_turn += len(calls)
        for call in calls:
            self.run(partial(self._take_turns, call))

    def _take_turns(self, call: Wait | None) -> None:
        while call is not None:
            call()
            del call  # releases the buffers of its transfers
            with self._lock:
                call = self._queue.popleft() if self._queue else None
                self._turn_began = monotonic()
                self._in_turn -= call is None

    def close(self, timeout_seconds: float) -> None:
        """Let every thread end when the calls made so far have returned, and wait for that up to the timeout."""
        with self._lock:
            threads = list(self._threads)
        for _ in threads:
            self._calls.put(None)
        deadline = monotonic() + timeout_seconds
        for thread in threads:
            thread.join(max(0.0, deadline - monotonic()))

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call
            with self._lock:
                if self._idle >= MOST_IDLE:
                    self._threads.discard(threading.current_thread())
                    return
                self._idle += 1


class TimedCall(Generic[T]):
    """A call of a function that has no time limit, made later on a thread that is started now.

    Python 3.12 and later start no thread while the interpreter ends, where such calls are made too.
    """

    def __init__(self, action: Callable[[], T], name: str) -> None:
        self._due = threading.Event()
        self._outcome: Future[T] = Future()

        def run() -> None:
            self._due.wait()
            try:
                self._outcome.set_result(action())
            except BaseException as error:
                self._outcome.set_exception(error)

        threading.Thread(target=run, name=name, daemon=True).start()

    def within(self, seconds: float) -> bool:
        """Make the call. True if it returned in time; otherwise its thread is left behind."""
        self._due.set()
        return bool(wait([self._outcome], seconds).done)

    def result(self) -> T:
        """Return the result of the call, which has returned, or raise its exception."""
        return self._outcome.result()


@contextmanager
def ends_process_after(seconds: float, message: str) -> Iterator[None]:
    """End this process, with ``message`` and status 1, if the block takes longer than ``seconds``.

    For calls that let no Python thread run. Without native kernels, faulthandler prints a traceback in place of the
    message, and takes the user's alarm.
    """
    seconds = min(seconds, LONGEST_SECONDS)
    try:
        from hvdkit.kernels._native import LastResort
    except ImportError:
        faulthandler.dump_traceback_later(seconds, exit=True, file=STANDARD_ERROR)
        cancel = faulthandler.cancel_dump_traceback_later
    else:
        cancel = LastResort(seconds, f"hvdkit: {message}\n").cancel
    try:
        yield
    finally:
        cancel()
