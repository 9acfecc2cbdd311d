"""The thread that prints the output of an elastic job, so that a terminal that takes nothing stops no other part."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable


class Printer:
    """Calls that print, made in their order on a thread. ``error``: the exception that ended the thread, or None."""

    def __init__(self, wake: Callable[[], object]) -> None:
        self.error: BaseException | None = None
        self._wake = wake  # called after an error
        self._calls: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="hvdkitrun-output", daemon=True)
        self._thread.start()

    def put(self, call: Callable[[], object]) -> None:
        """Have the thread make a call behind the earlier ones."""
        self._calls.put(call)

    def close(self) -> None:
        """Wait until all calls are made. Raises the exception that ended the thread."""
        self._calls.put(None)
        self._thread.join()
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        try:
            while (call := self._calls.get()) is not None:
                call()
        except BaseException as error:
            self.error = error
            self._wake()
