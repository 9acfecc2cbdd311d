"""The integers that asynchronous operations return, and what becomes of each when it is synchronised."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from hvdkit.engine.ops.batch import Handle


class HandleTable:
    """Operations in flight by number. Numbers are never used twice, so a stale one cannot mean another operation."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._pending: dict[int, tuple[Handle, Callable[[Any], Any]]] = {}

    def add(self, handle: Handle, finish: Callable[[Any], Any]) -> int:
        """Keep an operation; ``finish`` turns the engine's result into what ``synchronize`` returns."""
        number = next(self._numbers)
        self._pending[number] = handle, finish
        return number

    def poll(self, number: int) -> bool:
        """Whether ``synchronize(number)`` will return at once. Raises ValueError for an unknown or finished number."""
        pending = self._pending.get(number)
        if pending is None:
            raise ValueError(f"poll: handle {number} was not created or has been synchronized already")
        return pending[0].done()

    def synchronize(self, number: int) -> Any:
        """Wait for an operation and return its result, or None for an unknown or finished number."""
        handle, finish = self._pending.pop(number, (None, None))
        return None if handle is None or finish is None else finish(handle.wait())

    def clear(self) -> None:
        """Forget all operations, as at shutdown."""
        self._pending.clear()


HANDLES = HandleTable()
