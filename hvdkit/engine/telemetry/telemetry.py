"""The engine's records for people: the timeline, while one is recorded, and what communication cost."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, NamedTuple

from hvdkit.compression import Tally
from hvdkit.engine.telemetry.timeline import Timeline


@dataclass(frozen=True)
class CommunicationStatistics:
    """Totals since ``hvd.init()``."""

    bytes_sent: int  # payload bytes that this rank sent, or handed over in its node's memory
    reductions: int  # pieces of planned gradients that were reduced
    reduced_bytes: int  # bytes of gradients in them
    seconds: float  # wall seconds in which a training thread of this rank waited for communication
    busy_seconds: float  # wall seconds, summed over reductions, from start to end; they overlap


class Statistics:
    """The counters behind ``CommunicationStatistics``, while the engine runs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reductions = self._reduced_bytes = 0
        self._busy = self._waited = 0.0
        self._encoded: dict[str, Tally] = {}

    def reduced(self, nbytes: int, seconds: float) -> None:
        with self._lock:
            self._reductions += 1
            self._reduced_bytes += nbytes
            self._busy += seconds

    def encoded(self, codec: str, tally: Tally) -> None:
        """Count an encoded operation by name."""
        with self._lock:
            self._encoded.setdefault(codec, Tally()).add(tally)

    def encoded_by_name(self) -> dict[str, Tally]:
        """Return the tallies of operations by name, by codec."""
        with self._lock:
            return {codec: replace(tally) for codec, tally in self._encoded.items()}

    def waited(self, seconds: float) -> None:
        with self._lock:
            self._waited += seconds

    def totals(self, bytes_sent: int) -> CommunicationStatistics:
        with self._lock:
            return CommunicationStatistics(bytes_sent, self._reductions, self._reduced_bytes, self._waited, self._busy)


class Arrival(NamedTuple):
    """The rank that came last to an operation, and how many seconds after the rank before it and after the first."""

    rank: int
    after_the_one_before: float
    after_the_first: float

    @property
    def activity(self) -> str:
        """The name of the wait in the timeline."""
        return f"WAIT_FOR_RANK_{self.rank}"

    @property
    def fields(self) -> dict[str, Any]:
        """The arguments of the wait in the timeline."""
        before, first = round(1e3 * self.after_the_one_before, 3), round(1e3 * self.after_the_first, 3)
        return {"last_rank": self.rank, "ms_after_the_one_before": before, "ms_after_the_first": first}


def last_of(came: Mapping[int, float]) -> Arrival | None:
    """Return the arrival of the last rank, by times in seconds; the lowest of equal ranks; None for fewer than two."""
    if len(came) < 2:
        return None
    times = sorted(came.values())
    rank = min(rank for rank, at in came.items() if at == times[-1])
    return Arrival(rank, times[-1] - times[-2], times[-1] - times[0])


class Telemetry:
    """The records of one rank. A row of the timeline is anything with a name: a key, a bucket."""

    def __init__(self, rank: int) -> None:
        self.statistics = Statistics()
        self.timeline: Timeline | None = None  # another thread may stop it, so callers read this once
        self._rank = rank
        # By operation that some rank has not asked for yet: when each of the other ranks asked.
        self._requests: dict[object, dict[int, float]] = {}

    def start(self, path: str, mark_cycles: bool) -> None:
        """Begin recording on rank 0, in place of what was being recorded."""
        self.stop()
        if self._rank == 0:
            self.timeline = Timeline(path, self._rank, mark_cycles)

    def stop(self) -> None:
        """Write the rest and end the recording, if there is one."""
        timeline, self.timeline = self.timeline, None
        self._requests.clear()
        if timeline is not None:
            timeline.close()

    def begin(self, row: object, activity: str, **args: Any) -> None:
        """Begin an activity now; activities of a row nest."""
        timeline = self.timeline
        if timeline is not None:
            timeline.begin(str(row), activity, **args)

    def end(self, row: object) -> None:
        """End the innermost activity of the row now."""
        timeline = self.timeline
        if timeline is not None:
            timeline.end(str(row))

    def failed(self, row: object) -> None:
        """End the records of an operation that failed before all ranks had asked for it."""
        self._requests.pop(row, None)
        self.end(row)

    def record_request(self, row: object, rank: int) -> None:
        """Note when a rank asks for an operation, while a timeline is recorded."""
        self._requests.setdefault(row, {})[rank] = perf_counter()

    def record_wait(self, row: object) -> None:
        """Show for which rank this rank waited, once all ranks have asked for an operation."""
        timeline, came = self.timeline, self._requests.pop(row, {})
        last = last_of(came)
        if timeline is not None and last is not None and self._rank in came:
            timeline.span(str(row), last.activity, came[self._rank], perf_counter(), **last.fields)
