"""Wait for what must happen soon."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(condition: Callable[[], object], seconds: float = 60.0, what: object = "what is waited for") -> None:
    """Wait until ``condition()`` is true; fails where it takes longer. ``what``: its name, or tells what there is."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"never happened: {what() if callable(what) else what}"
        time.sleep(0.01)
