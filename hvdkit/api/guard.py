"""Whether somebody reduces gradients: what an optimizer that was not wrapped asks before it warns."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class GradientWatch:
    """Who reduces gradients in this process: the user, by a tape, or a wrapped optimizer, around a plain one."""

    def __init__(self) -> None:
        self.by_user = False
        self._thread = threading.local()

    def seen(self) -> None:
        """The user's program reduced gradients itself, and may give them to any optimizer."""
        self.by_user = True

    @property
    def inside(self) -> bool:
        """Whether this thread is in an optimizer's step on gradients that were reduced, or are about to be."""
        return bool(getattr(self._thread, "depth", 0))

    @contextmanager
    def reduced(self) -> Iterator[None]:
        """In this context optimizers are given reduced gradients."""
        self._thread.depth = getattr(self._thread, "depth", 0) + 1
        try:
            yield
        finally:
            self._thread.depth -= 1


WATCH = GradientWatch()
