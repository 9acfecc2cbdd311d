"""What the engine tells people of its work: the timeline, while one is recorded, and what communication cost."""

from __future__ import annotations

from typing import Any

from hvdkit.engine.telemetry.statistics import Statistics
from hvdkit.engine.telemetry.timeline import Timeline


class Telemetry:
    """Of one rank. Rows of the timeline are whatever has a name: a key, a bucket."""

    def __init__(self, rank: int) -> None:
        self.statistics = Statistics()
        self.timeline: Timeline | None = None  # another thread may stop it, so who uses it takes it once
        self._rank = rank

    def start(self, path: str, mark_cycles: bool) -> None:
        """Begin recording on rank 0, in place of what was being recorded."""
        self.stop()
        if self._rank == 0:
            self.timeline = Timeline(path, self._rank, mark_cycles)

    def stop(self) -> None:
        """Write the rest and end the recording, if there is one."""
        timeline, self.timeline = self.timeline, None
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
