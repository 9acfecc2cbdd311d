"""A failed job in a few lines: who failed first and where, and one line for what became of the others."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from time import monotonic

from hvdkit.environments.failure_record import ANOTHER, Record
from hvdkit.errors import cut_off
from hvdkit.launch.writing import write_all

SAYS = "hvdkitrun: "
LONGEST_LINE = 200
FILE = "failure.txt"


class Failures:
    """What ranks have told of their ends. ``verbose``: all tracebacks are shown, as they come.

    Else the first is, at once, for a rank that fails may take long to end: folded, or in a line if it is another one's
    fault, which may come yet. The others are at the end.
    """

    def __init__(self, verbose: bool = False) -> None:
        self.records: dict[int, Record] = {}  # by rank, as they came in
        self.tracebacks: dict[int, str] = {}
        self.times: dict[int, float] = {}  # when the records came, on the monotonic clock
        self._verbose = verbose
        self._shown: set[int] = set()  # all of it, or its line
        self._folded: set[int] = set()

    def take(self, rank: int, record: Record, traceback: str) -> bool:
        """A rank tells of its end. Returns whether it had not before: its command may start several processes."""
        if rank in self.records:
            return False
        self.records[rank], self.tracebacks[rank], self.times[rank] = record, traceback, monotonic()
        if self._verbose:
            _print([f"{SAYS}rank {rank} failed:", *(traceback or told(record)).splitlines()])
        elif not self._shown:
            if record.after is None:
                self._show(rank)
            else:
                self._shown.add(rank)
                _print([f"{SAYS}rank {rank}: {shortened(record.error)}"])
        return True

    def _show(self, rank: int, missed: int | None = None) -> None:
        """All of one, less the line that stands there already; ``missed``: the rank that it waited for, if known."""
        record = self.records[rank]
        error = record.error.splitlines()
        if rank in self._shown and len(error[0]) <= LONGEST_LINE:  # else it was cut off
            del error[0]
        self._shown.add(rank)
        self._folded.add(rank)
        waited = "another rank" if missed in (None, rank) else f"rank {missed}"
        how = "failed" if record.after is None else f"waited for {waited}"
        _print([f"{SAYS}rank {rank} {how}:", *record.frames.splitlines(), *error])

    def show_rest(self, first: int | None, folder: Path | None) -> None:
        """At the end: ``first`` failed first, if that is known. All tracebacks go into the output's folder, if any."""
        if not self.records or self._verbose:
            return
        if not self._folded:  # of a rank that left without a word, the first that missed it is shown
            self._show(first if first in self.records else next(iter(self.records)), first)
        _print(others(self.records, self._shown))
        text = "".join(f"rank {rank}:\n{self._text(rank)}" for rank in sorted(self.records))
        try:
            where = keep(text, folder)
        except OSError as error:  # a full disk may be why the job failed
            _print([f"{SAYS}cannot keep all tracebacks in a file: {error}", *text.splitlines()])
        else:
            _print([f"{SAYS}all tracebacks are in {where}, or shown with --verbose"])

    def first(self, ended: int, by_signal: bool, at: float) -> int:
        """Return the rank that failed first.

        ``ended``: the rank whose end ended the job, ``by_signal`` or not, at the monotonic time ``at``. The launcher
        then ends the other ranks, and their failures are its doing: their records count only if they blame a rank.
        """
        records = {
            rank: record
            for rank, record in self.records.items()
            if rank == ended or record.after is not None or self.times[rank] < at
        }
        return first_to_fail(records, ended, by_signal)

    def _text(self, rank: int) -> str:
        return (self.tracebacks[rank] or told(self.records[rank])).rstrip("\n") + "\n"


def _print(lines: Iterable[str]) -> None:
    sys.stderr.flush()
    write_all(sys.stderr.fileno(), "".join(f"{line}\n" for line in lines).encode(errors="backslashreplace"))


def told(record: Record) -> str:
    """The user's own lines, and the error."""
    return f"{record.frames}{record.error}\n"


def first_to_fail(records: Mapping[int, Record], ended: int, by_signal: bool) -> int:
    """The rank that failed first. ``records`` by rank, as they came in.

    ``ended`` is the rank whose end ended the job, and ``by_signal`` how: one that fails because another one was lost
    may end before that one does, and one that leaves in good order while others need it ends no job.
    """
    if ended not in records and by_signal:
        return ended
    own = next((rank for rank, record in records.items() if record.after is None), None)
    if own is not None:
        return own
    if ended not in records:
        return ended
    blamed = [one.after for one in records.values() if one.after not in (None, ANOTHER, *records)]
    return next((rank for rank in blamed if rank is not None), ended)


def others(records: Mapping[int, Record], shown: Iterable[int]) -> list[str]:
    """What became of those that are not ``shown``: a line for all that say the same."""
    errors = {records[rank].error for rank in shown}
    alike: dict[str, list[int]] = {}
    for rank, record in sorted(records.items()):
        if rank not in shown:
            alike.setdefault("the same" if record.error in errors else shortened(record.error), []).append(rank)
    return [f"{SAYS}rank{'s' if len(ranks) > 1 else ''} {spans(ranks)}: {text}" for text, ranks in alike.items()]


def shortened(error: str) -> str:
    """The first line of an error, without the path of its class."""
    line = next(iter(error.splitlines()), "")
    kind = re.match(r"[\w.]*\.(?=\w+(?::|$))", line)
    return cut_off(line[kind.end() :] if kind else line, LONGEST_LINE)


def spans(ranks: list[int]) -> str:
    """Ranks in order, with what follows each other as a span: "0, 2-63"."""
    found: list[list[int]] = []
    for rank in ranks:
        if found and rank == found[-1][-1] + 1:
            found[-1] = [found[-1][0], rank]
        else:
            found.append([rank])
    return ", ".join("-".join(map(str, span)) for span in found)


def keep(text: str, folder: Path | None) -> str:
    """Write the tracebacks into the folder of the ranks' output, else into a file of its own. Returns its path."""
    if folder is not None:
        path = str(folder / FILE)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    else:
        descriptor, path = tempfile.mkstemp(prefix="hvdkit-", suffix=f"-{FILE}")
    with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
        file.write(text)
    return path
