"""The report of a failed job: the rank that failed first, with its traceback, and a line about the other ranks."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from time import monotonic

from hvdkit.environments.failure_record import ANOTHER, Record, write_all
from hvdkit.errors import cut_off

SAYS = "hvdkitrun: "
LONGEST_LINE = 200
PREFIX, FILE = "hvdkit-", "failure.txt"
ABSENCES = ("no sign of life", "no answer")  # words of errors about ranks that are stopped, or whose Python is
FOR_HOROVOD = "HINT: the script imports horovod: import hvdkit instead, or start it with hvdkitrun --as-horovod"
MOST_FILES = 5  # of failed jobs of this user, in the folder for temporary files


class Failures:
    """The failure records of all ranks. ``verbose``: print every traceback as it comes. ``later``: print none so soon.

    Otherwise print the first at once, for a failed rank may take long to end: folded, or as a line if another rank
    caused the failure, since that rank's own record may follow. Print the rest at the job's end.
    """

    def __init__(self, verbose: bool = False, later: bool = False) -> None:
        self.records: dict[int, Record] = {}  # by rank, in the order of their arrival
        self.tracebacks: dict[int, str] = {}
        self.times: dict[int, float] = {}  # of the records' arrival, on the monotonic clock
        self._verbose, self._later = verbose, later
        self._shown: set[int] = set()  # ranks of which the record or its line was printed
        self._has_shown_a_record = False

    def take(self, rank: int, record: Record, traceback: str) -> bool:
        """Add a rank's record. Return False if it has one already, since its command may start several processes."""
        if rank in self.records:
            return False
        self.records[rank], self.tracebacks[rank], self.times[rank] = record, traceback, monotonic()
        if self._verbose:
            _print([f"{SAYS}rank {rank} failed:", *self._text(rank).splitlines()])
        elif self._later:
            return True
        elif not self._shown and record.after is None:
            self._show(rank)
        elif not self._shown:
            self._shown.add(rank)
            _print([f"{SAYS}rank {rank}: {shortened(record.error)}"])
        return True

    def clear(self) -> None:
        """Forget all records: the job goes on without the ranks that failed."""
        self.records.clear()
        self.tracebacks.clear()
        self.times.clear()

    def _show(self, rank: int, missed: int | None = None) -> None:
        """Print a rank's record, less a line that was printed before. ``missed``: the rank that it waited for."""
        record = self.records[rank]
        error = record.error.splitlines()
        if rank in self._shown and len(error[0]) <= LONGEST_LINE:  # a longer line was cut off
            del error[0]
        self._shown.add(rank)
        self._has_shown_a_record = True
        waited = "another rank" if missed in (None, rank) else f"rank {missed}"
        how = "failed" if record.after is None else f"waited for {waited}"
        _print([f"{SAYS}rank {rank} {how}:", *record.frames.splitlines(), *error])

    def show_rest(self, first: int | None, folder: Path | None) -> None:
        """Print the rest after rank ``first`` failed; keep all tracebacks in ``folder``, else in a temporary file."""
        if not self.records or self._verbose:
            return
        if not self._has_shown_a_record:  # a rank left without a record: show the first rank that missed it
            self._show(first if first in self.records else next(iter(self.records)), first)
        _print(others(self.records, self._shown))
        text = "".join(f"rank {rank}:\n{self._text(rank)}" for rank in sorted(self.records))
        try:
            if folder is None:
                descriptor, path = tempfile.mkstemp(prefix=PREFIX, suffix=f"-{FILE}")
                _forget_old(Path(path).parent)
            else:
                path = str(folder / FILE)
                descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
                file.write(text)
        except OSError as error:  # a full disk may be why the job failed
            _print([f"{SAYS}cannot keep all tracebacks in a file: {error}", *text.splitlines()])
        else:
            kept = "" if folder is not None else f" (the newest {MOST_FILES} such files are kept)"
            _print([f"{SAYS}all tracebacks are in {path}{kept}; --verbose prints them"])

    def first(self, ended: int, by_signal: bool, at: float) -> int:
        """Return the rank that failed first, where the end of ``ended`` at the monotonic time ``at`` ended the job.

        The launcher then ends the other ranks and causes their failures: their records count only if they blame a rank.
        """
        records = {
            rank: record
            for rank, record in self.records.items()
            if rank == ended or record.after is not None or self.times[rank] < at
        }
        return first_to_fail(records, ended, by_signal)

    def absence(self, rank: int) -> str:
        """Return how a rank without a record ended the job: it was silent, as a stopped rank is, or it left."""
        errors = [record.error for record in self.records.values() if record.after == rank]
        for words in ABSENCES:
            if any(words in error for error in errors):
                return f"gave {words}, which ended the job"
        return "left the job before the others, which ended it"

    def _text(self, rank: int) -> str:
        record = self.records[rank]
        return (self.tracebacks[rank] or f"{record.frames}{record.error}").rstrip("\n") + "\n"


def _forget_old(folder: Path) -> None:
    """Remove the files of this user's earlier failed jobs, except the newest."""
    ages: list[tuple[float, Path]] = []
    for path in folder.glob(f"{PREFIX}*-{FILE}"):
        with contextlib.suppress(OSError):  # another hvdkitrun removes it
            status = path.stat()
            if status.st_uid == os.geteuid():
                ages.append((status.st_mtime, path))
    for _, path in sorted(ages)[:-MOST_FILES]:
        with contextlib.suppress(OSError):
            path.unlink()


def _print(lines: Iterable[str]) -> None:
    sys.stderr.flush()
    write_all(sys.stderr.fileno(), "".join(f"{line}\n" for line in lines).encode(errors="backslashreplace"))


def first_to_fail(records: Mapping[int, Record], ended: int, by_signal: bool) -> int:
    """Return the rank that failed first. ``records`` are in the order of their arrival; ``ended`` ended the job.

    A rank that fails because of the loss of another rank may end before it. A rank that leaves in good order ends no
    job, though others may need it.
    """
    if ended not in records and by_signal:
        return ended
    own = next((rank for rank, record in records.items() if record.after is None), None)
    if own is not None:
        return own
    if ended not in records:
        return ended
    causes = [record.after for record in records.values() if record.after not in (None, ANOTHER, *records)]
    return next((rank for rank in causes if rank is not None), ended)


def others(records: Mapping[int, Record], shown: Iterable[int]) -> list[str]:
    """Return a line for all ranks with the same error, of the ranks that are not ``shown``."""
    errors = {records[rank].error for rank in shown}
    ranks_of: dict[str, list[int]] = {}
    for rank, record in sorted(records.items()):
        if rank not in shown:
            ranks_of.setdefault("the same" if record.error in errors else shortened(record.error), []).append(rank)
    return [f"{SAYS}{named(ranks)}: {text}" for text, ranks in ranks_of.items()]


def named(ranks: list[int]) -> str:
    """Return sorted ranks as text: "rank 3", "ranks 0, 2-63"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {spans(ranks)}"


def shortened(error: str) -> str:
    """Return the first line of an error, without the path of its class."""
    return cut_off(re.sub(r"^[\w.]*\.(?=\w+(?::|$))", "", error.partition("\n")[0]), LONGEST_LINE)


def spans(ranks: list[int]) -> str:
    """Return sorted ranks as text, with consecutive ranks as a span: "0, 2-63"."""
    begins = [rank for rank in ranks if rank - 1 not in ranks]
    ends = [rank for rank in ranks if rank + 1 not in ranks]
    return ", ".join(f"{begin}-{end}" if end > begin else f"{begin}" for begin, end in zip(begins, ends, strict=True))


def exit_status(code: int) -> int:
    """Return the shell's status for a return code of ``subprocess``."""
    return code if code >= 0 else 128 - code


def signal_name(number: int) -> str:
    """Return ``SIGKILL`` for 9; real-time signals have no names."""
    return signal.Signals(number).name if number in set(signal.Signals) else "with no name"


def imports_horovod(command: Sequence[str]) -> bool:
    """True if the first Python script in a command can be read here and imports Horovod."""
    script = next((word for word in command if word.endswith(".py")), None)
    try:
        text = "" if script is None else Path(script).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    imports = re.search(r"^[ \t]*(import[ \t]+horovod\b|from[ \t]+horovod[.\w]*[ \t]+import\b)", text, re.MULTILINE)
    return imports is not None and "install_as_horovod" not in text
