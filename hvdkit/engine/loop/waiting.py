"""Threads that wait for a handle or a lane, and drive the engine meanwhile."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import get_ident
from time import monotonic
from typing import TYPE_CHECKING

from hvdkit.engine.loop.driver import Driver
from hvdkit.engine.loop.messages import Waits
from hvdkit.engine.loop.negotiation import Negotiation
from hvdkit.engine.ops.batch import Handle
from hvdkit.errors import ForkedChildError

if TYPE_CHECKING:
    from hvdkit.engine.loop.completion import Completion
    from hvdkit.engine.steps.lane import Lane


@dataclass
class WaitingThread:
    """A thread that waits for the result of ``subject``."""

    subject: Handle | Lane | Completion
    since: float
    reported_at: float = 0.0  # when the coordinator last heard of it
    warned: bool = False


class WaitingThreads:
    """The threads of this rank that wait for results."""

    def __init__(self, driver: Driver, negotiation: Negotiation) -> None:
        self.driver, self._negotiation = driver, negotiation
        self._process = os.getpid()
        self.by_thread: dict[int, WaitingThread] = {}
        # The threads that submit. With several of them the rank is never known to be blocked as a whole.
        self.submitters: set[int] = set()
        self.dependents: dict[int, Collection[int]] = {}  # the threads that wait for what a thread computes

    def wait(self, subject: Handle | Lane | Completion, finished: Callable[[], bool]) -> None:
        """Drive the engine from the calling thread until ``finished()``. Raises ForkedChildError in a forked child."""
        if os.getpid() != self._process:
            raise ForkedChildError(self._negotiation.mailbox.me(), self._process)
        thread = get_ident()
        self.submitters.add(thread)
        waiting = self.by_thread[thread] = WaitingThread(subject, monotonic())
        try:
            self.driver.drive_until(finished)
        finally:
            self.by_thread.pop(thread, None)
            if waiting.reported_at and self._negotiation.mailbox.error is None:
                self._negotiation.send_later(Waits(None, [], "", None))

    @contextmanager
    def standing_for(self, threads: Collection[int]) -> Iterator[None]:
        """Note for the time of this context that ``threads`` wait for what the calling thread computes."""
        thread = get_ident()
        self.dependents[thread] = threads
        try:
            yield
        finally:
            del self.dependents[thread]
