"""Writing to a pipe or terminal without losing anything."""

from __future__ import annotations

import os
import select


def write_all(descriptor: int, data: bytes) -> None:
    """Write to a pipe or terminal, whoever made it non-blocking.

    Python's own buffered writer loses bytes where signals, as here SIGCHLD, interrupt it.
    """
    left = memoryview(data)
    while left:
        try:
            left = left[os.write(descriptor, left) :]
        except BlockingIOError:
            select.select([], [descriptor], [])
