"""Who came last to an operation, and how late: what a wait in the timeline is called and tells."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any, NamedTuple

from hvdkit.transports.base import Transfer


class Arrival(NamedTuple):
    """The rank that came last, and how many seconds after the one before it and after the first."""

    rank: int
    after_the_one_before: float
    after_the_first: float

    @property
    def activity(self) -> str:
        """What the wait is called."""
        return f"WAIT_FOR_RANK_{self.rank}"

    @property
    def fields(self) -> dict[str, Any]:
        """What the wait tells."""
        return {
            "last_rank": self.rank,
            "ms_after_the_one_before": round(1e3 * self.after_the_one_before, 3),
            "ms_after_the_first": round(1e3 * self.after_the_first, 3),
        }


def last_of(came: Mapping[int, float]) -> Arrival | None:
    """Of ranks and when each came, in seconds; None of fewer than two. Of several at once it is the lowest rank."""
    if len(came) < 2:
        return None
    times = sorted(came.values())
    rank = min(rank for rank, at in came.items() if at == times[-1])
    return Arrival(rank, times[-1] - times[-2], times[-1] - times[0])


class FirstData:
    """Stands among transfers that it watches, as one that is done when they are, and notes when each peer's were."""

    peer = -1

    def __init__(self, transfers: Sequence[Transfer], clock: Callable[[], float] = perf_counter) -> None:
        self._left, self._clock = list(transfers), clock
        self.came: dict[int, float] = {}

    def done(self) -> bool:
        """Whether all are done. Raises what one of them raises."""
        left = []
        for transfer in self._left:
            if transfer.done():
                self.came[transfer.peer] = self._clock()
            else:
                left.append(transfer)
        self._left = left
        return not left

    def awaited(self) -> list[int]:
        """The peers of those that are not done."""
        return [transfer.peer for transfer in self._left]
