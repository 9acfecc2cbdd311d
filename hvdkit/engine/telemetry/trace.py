"""The reader of a recorded timeline: its activities, and the waits for ranks that came late.

Many operations may wait for the same late rank at a time, as the tensors of ``broadcast_parameters`` do. Their waits
overlap, and count as a single wait.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from hvdkit.errors import abridged

SHORTEST_WAIT_MS = 1.0  # shorter waits are no lateness: some rank always comes last
ROUNDED_MS = 0.001  # times are rounded: a step begins up to so much after the end of the step before
_STEP = "STEP "


class Activity(NamedTuple):
    """An activity of a row, with times in milliseconds since the recording began."""

    row: str
    name: str
    begin: float
    end: float
    args: dict[str, Any]


class Trace(NamedTuple):
    """A recording. ``unfinished``: the activities that had begun at its end, with their rows."""

    activities: list[Activity]
    unfinished: list[tuple[str, str]]

    @property
    def steps(self) -> list[Activity]:
        """The steps of all optimizers, in the order of their ends."""
        return [activity for activity in self.activities if activity.name.startswith(_STEP)]


class LateWait(NamedTuple):
    """A wait of all other ranks for ``rank``, in milliseconds since the recording began."""

    rank: int
    begin: float
    end: float
    in_step: bool


def read_trace(path: str | os.PathLike[str]) -> Trace:
    """Read a timeline. Raises OSError, and ValueError if the file is no timeline of hvdkit."""
    with open(path, encoding="utf-8") as file:
        try:
            events = json.load(file)
            if not isinstance(events, list):
                raise TypeError("not a list of events")
            return _trace_of(events)
        except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
            hint = "record one with hvdkitrun --timeline-filename, or hvd.start_timeline()"
            raise ValueError(f"{os.fspath(path)} is not a timeline of hvdkit ({error!r})\nHINT: {hint}") from error


def _trace_of(events: Iterable[dict[str, Any]]) -> Trace:
    rows: dict[int, str] = {}
    begun: dict[int, list[dict[str, Any]]] = {}
    activities = []
    for event in events:
        phase, tid = event["ph"], event["tid"]
        if phase == "M" and event["name"] == "thread_name":
            rows[tid] = event["args"]["name"]
        elif phase == "B":
            begun.setdefault(tid, []).append(event)
        elif phase in ("E", "X"):
            start = event if phase == "X" else begun[tid].pop()
            end = event["ts"] + event.get("dur", 0.0)
            activities.append(Activity(rows[tid], start["name"], start["ts"] / 1e3, end / 1e3, start.get("args", {})))
    unfinished = [(rows[tid], event["name"]) for tid, events in begun.items() for event in events]
    return Trace(activities, unfinished)


def late_waits(trace: Trace) -> list[LateWait]:
    """Return the waits for late ranks in the order of their ends.

    A wait lasts from the time at which all other ranks were there until the late rank came.
    """
    spans = united((step.begin, step.end + ROUNDED_MS) for step in trace.steps)
    by_rank: dict[int, list[tuple[float, float]]] = {}
    for activity in trace.activities:
        if "last_rank" in activity.args:
            begin = activity.end - activity.args["ms_after_the_one_before"]
            by_rank.setdefault(activity.args["last_rank"], []).append((begin, activity.end))
    waits = [
        LateWait(rank, begin, end, any(first <= end <= last for first, last in spans))
        for rank, intervals in by_rank.items()
        for begin, end in united(intervals)
        if end - begin >= SHORTEST_WAIT_MS
    ]
    return sorted(waits, key=lambda wait: wait.end)


def united(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the union of intervals, as intervals that do not overlap."""
    union: list[tuple[float, float]] = []
    for begin, end in sorted(intervals):
        if union and begin <= union[-1][1]:
            union[-1] = union[-1][0], max(end, union[-1][1])
        else:
            union.append((begin, end))
    return union


def _length(intervals: Iterable[tuple[float, float]]) -> float:
    return sum(end - begin for begin, end in united(intervals))


def report_waits(trace: Trace, waits: Sequence[LateWait]) -> str:
    """Return a table of the late ranks, and how much of the steps was lost by them."""
    steps = trace.steps
    lines = []
    if waits:
        lines += [
            f"{'late':10}{'in steps':^27}   {'outside of steps':^27}",
            f"{'':10}{'times   longest     total':>27}   {'times   longest     total':>27}",
        ]
    for rank in sorted({wait.rank for wait in waits}):
        cells = []
        for in_step in (True, False):
            lengths = [wait.end - wait.begin for wait in waits if (wait.rank, wait.in_step) == (rank, in_step)]
            longest, total = (
                (duration_in_words(max(lengths)), duration_in_words(sum(lengths))) if lengths else ("-", "-")
            )
            cells.append(f"{len(lengths):>7}{longest:>10}{total:>10}")
        lines.append(f"{f'rank {rank}':10}" + "   ".join(cells))
    lines += ["", _summary(steps, [wait for wait in waits if wait.in_step])]
    if trace.unfinished:
        names = abridged([f"{name} of {row}" for row, name in trace.unfinished])
        lines.append(f"Not finished when the recording ended: {names}")
    return "\n".join(lines).lstrip("\n")


def _summary(steps: Sequence[Activity], waits: Sequence[LateWait]) -> str:
    """Return the sentence about the steps."""
    if not steps:
        return "No steps are recorded: no optimizer of hvdkit made a step, or the recording ended before that."
    duration = _length((step.begin, step.end) for step in steps)
    if not waits:
        return f"No rank was late in {len(steps)} steps ({duration_in_words(duration)})."
    lost = {
        rank: _length((wait.begin, wait.end) for wait in waits if wait.rank == rank)
        for rank in sorted({wait.rank for wait in waits})
    }
    total, latest = _length((wait.begin, wait.end) for wait in waits), max(lost, key=lambda rank: lost[rank])
    return (
        f"In {len(steps)} steps ({duration_in_words(duration)}) the other ranks waited {duration_in_words(total)} "
        f"for a late rank ({total / duration:.0%}), the longest time for rank {latest} "
        f"({duration_in_words(lost[latest])})."
    )


def duration_in_words(milliseconds: float) -> str:
    """Return a duration with its unit, three digits of it."""
    return f"{milliseconds / 1e3:.3g} s" if milliseconds >= 999.5 else f"{milliseconds:.3g} ms"
