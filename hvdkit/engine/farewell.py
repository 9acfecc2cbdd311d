"""The last wait of a rank: for the others' goodbyes, or until it is clear that they are alive, or lost."""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hvdkit.engine.core import Engine

# How long shutdown waits for the others to shut down too. A rank that failed only makes sure that they have heard.
GOODBYE_SECONDS = 5.0
FAILED_GOODBYE_SECONDS = 0.3


class Farewell:
    """Tells the others goodbye; ``over()`` says when there is nothing to wait for any more.

    A rank that is only late may have much to do before it leaves: it answers, and is left alone. One that does not
    answer within the timeout is ``silent``: it was stopped or cut off, and its job would never end.
    """

    def __init__(self, engine: Engine, reason: str, code: int, failed: bool) -> None:
        self._engine = engine
        self._failed = failed
        self._deadline = monotonic() + (FAILED_GOODBYE_SECONDS if failed else GOODBYE_SECONDS)
        self._told = False
        self._asked_at: float | None = None
        self.silent: list[int] = []

        def tell() -> None:
            engine.negotiation.tell_everyone(["bye", reason, code])
            self._told = True

        engine.defer(tell)

    def missing(self) -> list[int]:
        """The ranks that have not said goodbye."""
        engine = self._engine
        return sorted(set(range(engine.transport.size)) - {engine.topology.rank, *engine.negotiation.departed})

    def over(self) -> bool:
        """Whether this rank may leave. Also where no message can be sent any more, it ends."""
        missing = self.missing()
        now = monotonic()
        if self._told and not missing:
            return True
        if now <= self._deadline:
            return False
        if self._failed or self._engine.error is not None or not self._told:
            return True
        if self._asked_at is None:
            self._asked_at = now
            self._engine.defer(lambda: self._engine.negotiation.tell(missing, ["ping"]))
        unheard = [rank for rank in missing if not self._engine.watch.heard_since(rank, self._asked_at)]
        if unheard and now > self._asked_at + self._engine.settings.timeout_seconds:
            self.silent = unheard
        return not unheard or bool(self.silent)
