"""Threads that complete futures, so that a user's callback may wait for other operations meanwhile."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue

logger = logging.getLogger("hvdkit")

_tasks: SimpleQueue[Callable[[], object]] = SimpleQueue()
_lock = threading.RLock()  # a finalizer may come in between
_idle = 0  # threads that have no task


def run(task: Callable[[], object]) -> None:
    """Run ``task`` on a thread of its own or on one that has ended its task: another task may block for long."""
    global _idle
    with _lock:
        _idle -= 1
        starts = _idle < 0
        if starts:
            _idle = 0
    _tasks.put(task)
    if starts:
        with suppress(RuntimeError):  # Python ends, and starts no threads any more
            threading.Thread(target=_serve, name="hvdkit-callbacks", daemon=True).start()


def _serve() -> None:
    global _idle
    while True:
        task = _tasks.get()
        try:
            task()
        except Exception:  # of a callback; the next ones must still run
            logger.exception("a callback of a future failed")
        del task
        with _lock:
            _idle += 1
