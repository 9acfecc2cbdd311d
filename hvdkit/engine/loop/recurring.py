"""Which operations come again: the coordinator's memory of those for which ranks may need nobody."""

from __future__ import annotations

from hvdkit.engine.ops.requests import Signature

# How many operations are remembered.
REMEMBERED = 4096


class Recurring:
    """Gives each operation a number when it comes for the second time as it was the first time."""

    def __init__(self) -> None:
        self._came: dict[object, Signature | None] = {}  # the longest ago first; None: it has its number
        self._numbers = 0

    def number(self, what: object, signature: Signature) -> int | None:
        """One that no operation has had, or None for what comes for the first time or has one."""
        is_new, before = what not in self._came, self._came.pop(what, None)
        comes_again = before == signature
        self._came[what] = signature if is_new or (before is not None and not comes_again) else None
        if len(self._came) > REMEMBERED:
            self._came.pop(next(iter(self._came)))
        self._numbers += comes_again
        return self._numbers - 1 if comes_again else None

    def forget(self) -> None:
        """What comes from now on comes for the first time."""
        self._came.clear()
