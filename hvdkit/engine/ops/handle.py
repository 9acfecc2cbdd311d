"""The promise of one operation's result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Handle:
    """Returned by every asynchronous operation. The engine finishes it once, with a result or an error."""

    __slots__ = ("_drive", "_error", "_finished", "_result", "_what", "label")

    def __init__(self, what: object, label: str | None, drive: Callable[[Handle, Callable[[], bool]], None]) -> None:
        self._what = what
        self.label = label  # the name that the user gave, None for an automatic one
        self._drive = drive
        self._finished = False
        self._result: Any = None
        self._error: BaseException | None = None

    @property
    def what(self) -> str:
        """For messages: "allreduce 'loss'"."""
        return str(self._what)

    def done(self) -> bool:
        """True when ``wait`` returns at once."""
        return self._finished

    def wait(self) -> Any:
        """The result. Raises HorovodInternalError where the operation failed."""
        if not self._finished:
            self._drive(self, self.done)
        if self._error is not None:
            raise self._error
        return self._result

    def finish(self, result: Any) -> None:
        if not self._finished:
            self._result = result
            self._finished = True

    def fail(self, error: BaseException) -> None:
        if not self._finished:
            self._error = error
            self._finished = True
