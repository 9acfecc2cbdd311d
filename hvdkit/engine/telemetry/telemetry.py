"""What the engine tells people of its work: the timeline, while one is recorded, and what communication cost."""

from __future__ import annotations

from time import perf_counter
from typing import Any

from hvdkit.engine.telemetry.arrivals import last_of
from hvdkit.engine.telemetry.statistics import Statistics
from hvdkit.engine.telemetry.timeline import Timeline


class Telemetry:
    """Of one rank. Rows of the timeline are whatever has a name: a key, a bucket."""

    def __init__(self, rank: int) -> None:
        self.statistics = Statistics()
        self.timeline: Timeline | None = None  # another thread may stop it, so who uses it takes it once
        self._rank = rank
        self._came: dict[object, dict[int, float]] = {}  # when each rank asked for what some rank has still to ask for

    def start(self, path: str, mark_cycles: bool) -> None:
        """Begin recording on rank 0, in place of what was being recorded."""
        self.stop()
        if self._rank == 0:
            self.timeline = Timeline(path, self._rank, mark_cycles)

    def stop(self) -> None:
        """Write the rest and end the recording, if there is one."""
        timeline, self.timeline = self.timeline, None
        self._came.clear()
        if timeline is not None:
            timeline.close()

    def begin(self, row: object, activity: str, **args: Any) -> None:
        """An activity starts now; activities of a row nest."""
        timeline = self.timeline
        if timeline is not None:
            timeline.begin(str(row), activity, **args)

    def end(self, row: object) -> None:
        """The innermost activity of the row ends now."""
        timeline = self.timeline
        if timeline is not None:
            timeline.end(str(row))

    def failed(self, row: object) -> None:
        """An operation that ranks asked for fails."""
        self._came.pop(row, None)
        self.end(row)

    def came(self, row: object, rank: int) -> None:
        """A rank asks for an operation, while a timeline is recorded."""
        self._came.setdefault(row, {})[rank] = perf_counter()

    def met(self, row: object) -> None:
        """All ranks have asked for an operation: shows for whom this one waited."""
        timeline, came = self.timeline, self._came.pop(row, {})
        last = last_of(came)
        if timeline is not None and last is not None and self._rank in came:
            timeline.span(str(row), last.activity, came[self._rank], perf_counter(), **last.fields)
