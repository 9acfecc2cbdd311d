"""Detection of lost ranks: a pure decision from the times of each rank's last answer and last beat.

A rank answers from Python; it beats from a thread that needs no Python (``transports/node/heartbeat``). A rank that
does neither for the timeout was killed, stopped or cut off. A rank that beats and does not answer may have a library
that keeps Python's lock: it gets a longer timeout. Some ranks' beats cannot be seen from here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

LONGEST_INTERVAL_SECONDS = 5.0
BLIND_PART = 1 / 2  # of the timeout: a rank that was paused for so long does not blame its peers for silence
SEEN_AGAIN_PART = 1 / 4  # of the timeout, within which beats are seen again after a pause


class Loss(NamedTuple):
    """A lost rank; ``beats`` if its process lives."""

    rank: int
    beats: bool


class Liveness:
    """The signs of life of the ranks that this rank waits for."""

    def __init__(self, timeout_seconds: float, unresponsive_seconds: float) -> None:
        self._timeout, self._unresponsive = timeout_seconds, unresponsive_seconds
        self._interval = min(LONGEST_INTERVAL_SECONDS, timeout_seconds / 4)
        self._answered: dict[int, float] = {}
        self._beats: dict[int, int] = {}
        self._beat_at: dict[int, float] = {}  # when this rank last saw the count of a rank move
        self._waited_since: dict[int, float] = {}
        self._pinged: dict[int, float] = {}  # when a rank was last asked
        self._checked_at: float | None = None
        self._blind_until = float("-inf")

    def heard(self, rank: int, now: float) -> None:
        """Record a message of ``rank``, which is an answer."""
        self._answered[rank] = now

    def heard_since(self, rank: int, since: float) -> bool:
        """True if ``rank`` has answered since then."""
        return self._answered.get(rank, 0.0) >= since

    def heard_lately(self, ranks: Iterable[int], now: float) -> bool:
        """True if every rank has answered since the last question but one, if it was asked."""
        return all(now - self._answered.get(rank, now) < 2 * self._interval for rank in ranks)

    def counted(self, rank: int, beats: int, now: float) -> None:
        """Record the number of beats of ``rank`` by now; 0 if it never gave any."""
        if beats != self._beats.get(rank, 0):
            self._beats[rank] = beats
            self._beat_at[rank] = now

    def looks(self, now: float) -> None:
        """Record that this rank looks at the others now."""
        if self._checked_at is not None and now - self._checked_at > BLIND_PART * self._timeout:
            self._blind_until = now
        self._checked_at = now

    def loss(self, rank: int, since: float, now: float) -> Loss | None:
        """Return the loss of ``rank``, for which this rank has waited since then; None if it is not lost."""
        last_answer = max(since, self._answered.get(rank, 0.0))
        answered = last_sign = max(last_answer, self._blind_until)
        if rank in self._beat_at:
            seen_again = self._blind_until - (1 - SEEN_AGAIN_PART) * self._timeout
            last_sign = max(last_answer, self._beat_at[rank], seen_again)
        if now - last_sign >= self._timeout:
            return Loss(rank, beats=False)
        return Loss(rank, beats=True) if now - answered >= self._unresponsive else None

    def check(self, awaited: Iterable[int], now: float) -> tuple[list[int], list[Loss]]:
        """Return the awaited ranks to ask for a sign of life now, and the losses among them."""
        awaited = set(awaited)
        for rank in set(self._waited_since) - awaited:
            del self._waited_since[rank]
            self._pinged.pop(rank, None)
        to_ask, losses = [], []
        for rank in sorted(awaited):
            since = self._waited_since.setdefault(rank, now)
            loss = self.loss(rank, since, now)
            if loss is not None:
                losses.append(loss)
            elif now - max(since, self._answered.get(rank, 0.0), self._pinged.get(rank, 0.0)) >= self._interval:
                self._pinged[rank] = now
                to_ask.append(rank)
        return to_ask, losses
