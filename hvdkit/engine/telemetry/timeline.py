"""A Chrome trace of what the engine does: one row per tensor or bucket, valid JSON on the disk after every flush.

Open it in chrome://tracing or Perfetto. The format is "Trace Event Format" (Google, 2016). Times are microseconds since
the recording began; docs/timeline.md has what the activities mean.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import threading
import time
from collections import deque
from typing import Any

_log = logging.getLogger(__name__)

FLUSH_EVENTS = 4096
FLUSH_SECONDS = 0.5
# Rows with this prefix stand above all others.
TRAINING = "training: "
COMPUTATION = TRAINING + "forward and backward"

TOP = 1 << 20  # their offset in the order of rows
_OPENING = b"["
_CLOSING = b"\n]\n"


class Timeline:
    """The events of a recording: a caller writes them out, at most every half second or after a number of events.

    Any thread may call any method. A file that cannot be written costs one warning and ends the recording.
    """

    def __init__(self, path: str | os.PathLike[str], rank: int, mark_cycles: bool = False) -> None:
        self.path = os.fspath(path)
        self.mark_cycles = mark_cycles
        self._rank = rank
        # Events with their rows. Appended to without the lock, emptied with it.
        self._events: deque[tuple[str | None, dict[str, Any]]] = deque()
        self._flushing = threading.Lock()
        self._rows: dict[str, int] = {}
        self._open: dict[str, int] = {}  # activities begun and not ended, by row
        self._process = os.getpid()
        self._file: int | None = None
        self._began = time.perf_counter()
        self._end = 0  # where the closing bracket is, and the next event goes
        self._next_flush = self._began + FLUSH_SECONDS
        try:
            self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
            self._end = os.pwrite(self._file, _OPENING + _CLOSING, 0) - len(_CLOSING)
            about: dict[str, Any] = {
                "process_name": {"name": f"rank {rank}"},
                "process_sort_index": {"sort_index": rank},
            }
            self._write([self._metadata(name, 0, args) for name, args in about.items()])
        except OSError as error:
            self._give_up(error)
        atexit.register(self.close)

    @property
    def recording(self) -> bool:
        """False once the timeline was closed or its file could not be written."""
        return self._file is not None

    def begin(self, row: str, activity: str, **args: Any) -> None:
        """Begin an activity now; activities of a row nest."""
        self._open[row] = self._open.get(row, 0) + 1
        self._record(row, "B", time.perf_counter(), name=activity, args=args)

    def end(self, row: str) -> None:
        """End the innermost activity of the row now, if one was begun in this recording."""
        if self._open.get(row):
            self._open[row] -= 1
            self._record(row, "E", time.perf_counter())

    def span(self, row: str, activity: str, start_seconds: float, end_seconds: float, **args: Any) -> None:
        """Record an activity that is over, by ``time.perf_counter``; the part before the recording is cut off."""
        start = max(start_seconds, self._began)
        self._record(row, "X", start, name=activity, dur=max(end_seconds - start, 0.0) * 1e6, args=args)

    def instant(self, name: str, **args: Any) -> None:
        """Set a mark over all rows, now."""
        self._record(None, "i", time.perf_counter(), name=name, s="p", args=args)

    def mark_cycle(self) -> None:
        """Mark one round of the engine, if ``mark_cycles``."""
        if self.mark_cycles:
            self.instant("CYCLE_START")

    def flush(self) -> None:
        """Write the recorded events."""
        if os.getpid() != self._process:
            return  # a forked child: the lock may be held by a thread that only the parent has
        with self._flushing:
            self._drain()

    def close(self) -> None:
        """Write the rest and end the recording; a second call does nothing."""
        if os.getpid() != self._process:
            return
        with self._flushing:
            self._drain()
            self._close_file()
        atexit.unregister(self.close)

    def _record(self, row: str | None, phase: str, seconds: float, **fields: Any) -> None:
        if self._file is None:
            return
        microseconds = round((seconds - self._began) * 1e6, 3)
        self._events.append((row, {"ph": phase, "pid": self._rank, "ts": microseconds, **fields}))
        due = len(self._events) >= FLUSH_EVENTS or time.perf_counter() >= self._next_flush
        # If another thread writes, do not wait for the disk.
        if due and self._flushing.acquire(blocking=False):
            try:
                self._drain()
            finally:
                self._flushing.release()

    def _drain(self) -> None:
        self._next_flush = time.perf_counter() + FLUSH_SECONDS
        # As many as there are now: other threads go on appending.
        events = [self._events.popleft() for _ in range(len(self._events))]
        # A forked child holds the same file, and a copy of events that the parent will write.
        if self._file is None or not events or os.getpid() != self._process:
            return
        lines: list[str] = []
        for row, event in events:
            if row is not None and row not in self._rows:
                self._rows[row] = number = len(self._rows) + 1
                lines.append(self._metadata("thread_name", number, {"name": row}))
                index = number - TOP if row.startswith(TRAINING) else number
                lines.append(self._metadata("thread_sort_index", number, {"sort_index": index}))
            lines.append(_json({**event, "tid": 0 if row is None else self._rows[row]}))
        try:
            self._write(lines)
        except OSError as error:
            self._give_up(error)

    def _metadata(self, name: str, row: int, args: dict[str, Any]) -> str:
        return _json({"ph": "M", "name": name, "pid": self._rank, "tid": row, "args": args})

    def _write(self, lines: list[str]) -> None:
        """Replace the closing bracket by events and a closing bracket, in one write."""
        assert self._file is not None
        separator = ",\n" if self._end > len(_OPENING) else "\n"
        payload = (separator + ",\n".join(lines)).encode() + _CLOSING
        try:
            written = os.pwrite(self._file, payload, self._end)
            # A disk that is almost full takes a part; asking again tells the reason.
            while written < len(payload):
                written += os.pwrite(self._file, payload[written:], self._end + written)
        except OSError:
            with contextlib.suppress(OSError):  # cut off a part that was written, and put the bracket where it was
                os.ftruncate(self._file, self._end)
                os.pwrite(self._file, _CLOSING, self._end)
            raise
        self._end += len(payload) - len(_CLOSING)

    def _give_up(self, error: OSError) -> None:
        _log.warning("timeline %s cannot be written, recording is off: %s", self.path, error.strerror or error)
        self._close_file()

    def _close_file(self) -> None:
        file, self._file = self._file, None
        self._events.clear()
        if file is not None:
            os.close(file)


def _json(event: dict[str, Any]) -> str:
    """Return an event as JSON; values that JSON cannot hold, such as NaN, as text."""
    try:
        return json.dumps(event, allow_nan=False, default=str, separators=(",", ":"))
    except (ValueError, TypeError):
        return json.dumps({**event, "args": {name: repr(value) for name, value in event["args"].items()}})
