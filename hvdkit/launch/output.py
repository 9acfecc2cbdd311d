"""The output of ranks: every line with its rank in front, as ``[1]<stdout>: text``, and the same in files.

Lines in which a rank tells of its failure (``environments/failure_record``) are taken out.
"""

from __future__ import annotations

import re
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from hvdkit.environments.failure_record import BEGINS, CODE, MARK, NOTE, RESULT, parse, write_all
from hvdkit.launch import LaunchError
from hvdkit.launch.failures import Failures
from hvdkit.launch.out_of_memory import MEMORY, explain

_BEGINS, _MARK, _NOTE = BEGINS.encode(), MARK.encode(), NOTE.encode()
_ANY_MARK = re.compile(b"%b|%b|%b" % (_BEGINS, _MARK, _NOTE))
_MARKED_LINES = re.compile(b"(?:%b|%b[^\n]*|%b[^\n]*)\n" % (_BEGINS, _MARK, _NOTE))
STREAMS = ("stdout", "stderr")
_LONGEST = 1 << 20  # bytes of an unfinished line that are kept waiting
# A carriage return alone ends a state of a progress bar; with a line feed, it ends a line.
_END = re.compile(rb"\r\n|\n|\r(?!\n|\Z)")


class LineSplitter:
    """A splitter of a stream of bytes into lines with their ends, wherever the stream was cut before."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that are now complete."""
        data = self._rest + data
        lines, start = [], 0
        # The rest has no line end in it, except perhaps a carriage return as its last byte.
        for match in _END.finditer(data, max(0, len(self._rest) - 1)):
            lines.append(data[start : match.end()])
            start = match.end()
        if len(data) - start > _LONGEST:
            lines.append(data[start:] + b"\n")
            start = len(data)
        self._rest = data[start:]
        return lines

    def flush(self) -> list[bytes]:
        """Return the unfinished line, ended."""
        rest, self._rest = self._rest, b""
        return [rest.rstrip(b"\r") + b"\n"] if rest else []


def without_marks(data: bytes) -> tuple[bytes, bytes]:
    """Return a rank's output without lines for hvdkitrun, and apart its end if that may begin such a line."""
    data = _MARKED_LINES.sub(b"", data)
    begin = data.rfind(_MARK[:1])
    rest = data[begin:] if begin >= 0 else b""
    if rest and any(
        mark.startswith(rest) or (rest.startswith(mark) and b"\n" not in rest) for mark in (_BEGINS, _MARK, _NOTE)
    ):
        return data[:begin], rest
    return data, b""


class Output:
    """The destination of the ranks' output: this process's streams, line by line, and files, byte by byte."""

    def __init__(
        self,
        size: int,
        folder: Path | None = None,
        timestamps: bool = False,
        verbose: bool = False,
        is_elastic: bool = False,
    ) -> None:
        self._clock: Callable[[], str] = time.ctime if timestamps else lambda: ""
        self._splitters: defaultdict[tuple[int, str], LineSplitter] = defaultdict(LineSplitter)
        self._folder, self._width = folder, len(str(size - 1))
        self._files: dict[tuple[int, str], BinaryIO] = {}
        if folder is not None:
            for rank in range(size):
                self._open_files(rank, folder)
        self.failures = Failures(verbose, later=is_elastic)
        self.noted: defaultdict[str, set[int]] = defaultdict(set)  # the ranks that sent a note, such as INIT
        self.results: defaultdict[int, bytes] = defaultdict(bytes)  # of a function, in base 64
        self.codes: dict[int, int] = {}  # of ranks that failed under mpirun, in the order of their ends
        self.causes: defaultdict[int, str] = defaultdict(str)  # why a rank was killed, as far as its worker knows
        self._rest: dict[tuple[int, str], bytes] = {}  # for a file: bytes that may begin a mark
        self._held: dict[tuple[int, str], list[bytes]] = {}  # tracebacks whose record has not come yet

    def write(self, rank: int, stream: str, raw: bytes) -> None:
        """Take bytes that a rank wrote, and print complete lines at once."""
        if self._folder is not None:
            if (rank, stream) not in self._files:  # of a process that an elastic job has started later
                self._open_files(rank, self._folder)
            data, self._rest[rank, stream] = without_marks(self._rest.get((rank, stream), b"") + raw)
            self._files[rank, stream].write(data)
        self._print(rank, stream, self._splitters[rank, stream].feed(raw))

    def close(self) -> None:
        """Print unfinished lines and close the files."""
        for (rank, stream), splitter in self._splitters.items():
            self._print(rank, stream, splitter.flush())
        for (rank, stream), lines in self._held.items():  # the rank was killed before it sent the record
            self._show(rank, stream, lines)
        for source, file in self._files.items():
            file.write(self._rest.get(source, b""))
            file.close()

    def _shown(self, source: tuple[int, str], lines: list[bytes]) -> Iterator[bytes]:
        """Yield a rank's lines, without notes, records, and tracebacks that have a record."""
        for line in lines:
            if (mark := _ANY_MARK.search(line)) is None:
                if source in self._held:
                    self._held[source].append(line)
                else:
                    yield line
                continue
            if mark[0] == _NOTE:
                note, _, text = line[mark.end() :].strip().partition(b" ")
                if note == RESULT.encode():
                    self.results[source[0]] += text
                elif note == CODE.encode():
                    self.codes[source[0]] = int(text)
                elif note == MEMORY.encode():
                    self.causes[source[0]] = explain(text.decode(errors="replace"))
                else:
                    self.noted[note.decode(errors="replace")].add(source[0])
            elif mark[0] == _BEGINS:
                self._held.setdefault(source, [])
            else:
                record, held = parse(line[mark.start() :]), self._held.pop(source, [])
                traceback = b"".join(held).decode(errors="replace")
                if record is None or not self.failures.take(source[0], record, traceback):
                    yield from held
                if record is None:  # it is not whole
                    yield line
                    continue
            if mark.start() > 0:  # an unfinished line of the rank
                yield line[: mark.start()] + b"\n"

    def _print(self, rank: int, stream: str, lines: list[bytes]) -> None:
        self._show(rank, stream, list(self._shown((rank, stream), lines)))

    def _show(self, rank: int, stream: str, lines: list[bytes]) -> None:
        # A progress bar that begins with a carriage return leaves an empty line in front of it.
        lines = [line for line in lines if line != b"\r"]
        if not lines:
            return
        prefix = f"{self._clock()}[{rank}]<{stream}>: ".encode()
        target = sys.stdout if stream == "stdout" else sys.stderr
        target.flush()
        write_all(target.fileno(), b"".join(prefix + line for line in lines))

    def _open_files(self, rank: int, folder: Path) -> None:
        """Open ``folder/rank.N/stdout`` and ``stderr``; leading zeros in N make names sort as ranks do."""
        try:
            rank_folder = folder / f"rank.{rank:0{self._width}}"
            rank_folder.mkdir(parents=True, exist_ok=True)
            for stream in STREAMS:
                self._files[rank, stream] = (rank_folder / stream).open("wb", buffering=0)
        except OSError as error:
            hint = "give --output-filename a folder that can be written"
            raise LaunchError(f"cannot write the output files: {error}\nHINT: {hint}") from error
