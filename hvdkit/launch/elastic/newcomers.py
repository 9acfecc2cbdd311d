"""The search for new processes that cannot be connected, where some of those that joined at a time can."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from hvdkit.launch.elastic.workers import ElasticWorker, newest_of

MOST_ATTEMPTS = 10  # to connect new processes, without a step between, that do not count as failures


class Newcomers:
    """The order in which new processes join: all at once, or after a generation that could not connect, host by host.

    ``least``: the ranks that a generation needs.
    """

    def __init__(self, least: int) -> None:
        self._least = least
        self._is_by_host = False
        self._newest, self._attempts = -1, 0  # that failed in turn, with the same state

    def find_causes(
        self, former: list[ElasticWorker], has_trained: bool, blames: Mapping[int, int]
    ) -> list[ElasticWorker] | None:
        """Return the new processes because of which a generation could not connect.

        The result is None if they are to join again, host by host: several hosts may be the cause, and the others are
        enough. ``has_trained``: there is a state, and the new processes are those without it. Before that, those of
        the host with most processes are the old ones. ``blames``: how often others called each process lost; those
        that were blamed most are the cause. The result is empty if no process in particular is the cause.
        """
        newest = newest_of(former)
        self._attempts = self._attempts + 1 if newest == self._newest else 1
        self._newest = newest
        if self._attempts > MOST_ATTEMPTS:
            return []
        counts = _count_hosts(former)
        home = None if has_trained else max(counts, key=lambda host: counts[host], default=None)
        suspects = [worker for worker in former if worker.steps is None and worker.slot.host != home]
        most = max((blames.get(worker.number, 0) for worker in suspects), default=0)
        if has_trained and most:
            return [worker for worker in suspects if blames.get(worker.number, 0) == most]
        counts = _count_hosts(suspects)
        others = len(former) - len(suspects) + (min(counts.values(), default=0) if has_trained else 0)
        if len(counts) > has_trained and others >= self._least:
            self._is_by_host = True
            for worker in suspects:
                worker.generation = 0
            return None
        return suspects if has_trained else []

    def select(self, waiting: list[ElasticWorker], least: int, has_trained: bool) -> list[ElasticWorker]:
        """Return the processes that may be members of the next generation."""
        counts = _count_hosts(worker for worker in waiting if not worker.generation and not worker.must_leave)
        self._is_by_host &= len(counts) > has_trained
        if not self._is_by_host:
            return waiting
        host = max(counts, key=lambda host: counts[host]) if has_trained else None
        selected = [worker for worker in waiting if worker.generation or worker.slot.host == host]
        self._is_by_host = len(selected) >= least
        return selected if self._is_by_host else waiting


def _count_hosts(workers: Iterable[ElasticWorker]) -> Counter[str]:
    return Counter(worker.slot.host for worker in workers)
