"""The last wait of a rank: for the others' goodbyes, or until it is clear that they are alive, or lost."""

from __future__ import annotations

from time import monotonic

from hvdkit.engine.loop.mailbox import SETTLING_SECONDS, Mailbox
from hvdkit.engine.loop.messages import Bye, Ping
from hvdkit.engine.session.watch import Watch
from hvdkit.engine.telemetry.liveness import Loss

# How long shutdown waits for the others to shut down too. A rank that failed only makes sure that they have heard.
GOODBYE_SECONDS = 5.0
FAILED_GOODBYE_SECONDS = 0.3
# So often, whoever has not said goodbye is asked for a sign of life; most have when the first time comes.
ASKING_SECONDS = 0.5


class Farewell:
    """Tells the others goodbye; ``over()`` says when there is nothing to wait for any more.

    A rank that is only late may have much to do before it leaves: it answers, and is left alone. One that does not
    answer in time is among the ``losses``: it was stopped or cut off, or hangs, and its job would never end.
    """

    def __init__(self, mailbox: Mailbox, watch: Watch, reason: str, code: int, failed: bool) -> None:
        self._mailbox, self._watch = mailbox, watch
        self._failed = failed
        self._began = monotonic()
        self._announced = False
        self._asked_at: float | None = None
        self.losses: list[Loss] = []

        def tell() -> None:
            mailbox.tell_everyone(Bye(reason, code))
            self._announced = True

        mailbox.defer(tell)

    def missing(self) -> list[int]:
        """The ranks that have not said goodbye."""
        topology = self._mailbox.topology
        return sorted(set(range(topology.size)) - {topology.rank, *self._mailbox.departed})

    def over(self) -> bool:
        """Whether this rank may leave. Also where no message can be sent any more, it ends."""
        missing = self.missing()
        now = monotonic()
        waited = now - self._began
        if self._announced and not missing:
            return not self._mailbox.relay.held
        if self._failed or self._mailbox.failed or not self._announced:
            limit = FAILED_GOODBYE_SECONDS if self._failed else GOODBYE_SECONDS
            return waited > limit and (not self._mailbox.relay.held or waited > limit + SETTLING_SECONDS)
        if self._asked_at is None:
            if waited > ASKING_SECONDS:
                self._ask(missing, now)
            return False
        unheard = [rank for rank in missing if not self._mailbox.liveness.heard_since(rank, self._asked_at)]
        if unheard:
            self.losses = self._watch.lost_since(unheard, self._asked_at, now)
            return bool(self.losses)
        # An answer is worth no more than its age: the last one must have been asked for at the end.
        if self._asked_at > self._began + GOODBYE_SECONDS:
            return True
        if waited > GOODBYE_SECONDS or now > self._asked_at + ASKING_SECONDS:
            self._ask(missing, now)
        return False

    def _ask(self, ranks: list[int], now: float) -> None:
        self._asked_at = now
        self._mailbox.tell_later(ranks, Ping())
