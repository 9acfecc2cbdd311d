"""Which of the ranks that are waited for are lost: a pure decision from when they last answered, and last beat.

A rank answers by Python; it beats by a thread that needs none (see transports.heartbeat), as far as that is seen from
here. A rank that does neither for the timeout is lost, since it was killed, stopped or cut off. One that beats may have
a library that keeps Python's lock, or Python's threads may wait for each other for ever: it gets a longer timeout.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

LONGEST_INTERVAL_SECONDS = 5.0
# Who looks only after so large a part of the timeout did not run itself, and cannot blame others for silence.
BLIND_PART = 1 / 2
# In the memory of the node, or from the thread that receives them, beats are seen in so large a part of the timeout.
SEEN_AGAIN_PART = 1 / 4


@dataclass(frozen=True)
class Loss:
    """A rank that is lost; ``beats``: its process lives."""

    rank: int
    beats: bool


class Liveness:
    """A rank that is waited for is asked for a sign of life now and then."""

    def __init__(self, timeout_seconds: float, unresponsive_seconds: float) -> None:
        self._timeout = timeout_seconds
        self._unresponsive = unresponsive_seconds
        self._interval = min(LONGEST_INTERVAL_SECONDS, timeout_seconds / 4)
        self._heard: dict[int, float] = {}
        self._counts: dict[int, int] = {}
        self._beaten: dict[int, float] = {}  # when the count of a rank was last seen to have moved
        self._waited_since: dict[int, float] = {}
        self._asked: dict[int, float] = {}  # the last time a rank was asked
        self._looked: float | None = None
        self._blind_until = float("-inf")

    def heard(self, rank: int, now: float) -> None:
        """Any message of ``rank`` is a sign of life, and an answer."""
        self._heard[rank] = now

    def heard_since(self, rank: int, since: float) -> bool:
        """Whether ``rank`` has answered since then."""
        return self._heard.get(rank, 0.0) >= since

    def heard_lately(self, ranks: Iterable[int], now: float) -> bool:
        """Whether all of them have answered since they were asked the last time but one, if they were asked."""
        return all(now - self._heard.get(rank, now) < 2 * self._interval for rank in ranks)

    def counted(self, rank: int, beats: int, now: float) -> None:
        """So many beats of ``rank`` are counted by now; 0 if it never gave one."""
        if beats != self._counts.get(rank, 0):
            self._counts[rank] = beats
            self._beaten[rank] = now

    def looks(self, now: float) -> None:
        """This rank looks at the others now."""
        if self._looked is not None and now - self._looked > BLIND_PART * self._timeout:
            self._blind_until = now
        self._looked = now

    def loss(self, rank: int, since: float, now: float) -> Loss | None:
        """Whether ``rank``, which is waited for since then, is lost by now."""
        answered = max(since, self._heard.get(rank, 0.0), self._blind_until)
        if rank in self._beaten:
            seen_again = self._blind_until - (1 - SEEN_AGAIN_PART) * self._timeout
            lived = max(since, self._heard.get(rank, 0.0), self._beaten[rank], seen_again)
        else:
            lived = answered
        if now - lived >= self._timeout:
            return Loss(rank, beats=False)
        return Loss(rank, beats=True) if now - answered >= self._unresponsive else None

    def check(self, awaited: Iterable[int], now: float) -> tuple[list[int], list[Loss]]:
        """(ranks to ask now, ranks that are lost) among those waited for."""
        awaited = set(awaited)
        for rank in set(self._waited_since) - awaited:
            del self._waited_since[rank]
            self._asked.pop(rank, None)
        to_ask, losses = [], []
        for rank in sorted(awaited):
            since = self._waited_since.setdefault(rank, now)
            loss = self.loss(rank, since, now)
            if loss is not None:
                losses.append(loss)
            elif now - max(since, self._heard.get(rank, 0.0), self._asked.get(rank, 0.0)) >= self._interval:
                self._asked[rank] = now
                to_ask.append(rank)
        return to_ask, losses
