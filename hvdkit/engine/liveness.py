"""Which of the ranks that are waited for are lost: a pure decision from when they were last heard of."""

from __future__ import annotations

from collections.abc import Iterable


class Liveness:
    """A rank that is waited for is asked for a sign of life now and then; silence up to the timeout means lost."""

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout = timeout_seconds
        self._interval = min(5.0, timeout_seconds / 4)
        self._heard: dict[int, float] = {}
        self._waited_since: dict[int, float] = {}
        self._asked: dict[int, float] = {}  # the last time a rank was asked

    def heard(self, rank: int, now: float) -> None:
        """Any message of ``rank`` is a sign of life."""
        self._heard[rank] = now

    def heard_since(self, rank: int, since: float) -> bool:
        """Whether ``rank`` has given a sign of life since then."""
        return self._heard.get(rank, 0.0) >= since

    def check(self, awaited: Iterable[int], now: float) -> tuple[list[int], list[int]]:
        """(ranks to ask now, ranks that are lost) among those waited for."""
        awaited = set(awaited)
        for rank in set(self._waited_since) - awaited:
            del self._waited_since[rank]
            self._asked.pop(rank, None)
        to_ask, lost = [], []
        for rank in sorted(awaited):
            silent_since = max(self._waited_since.setdefault(rank, now), self._heard.get(rank, 0.0))
            if now - silent_since >= self._timeout:
                lost.append(rank)
            elif now - max(silent_since, self._asked.get(rank, silent_since)) >= self._interval:
                self._asked[rank] = now
                to_ask.append(rank)
        return to_ask, lost
