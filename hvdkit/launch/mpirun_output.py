"""A parser of mpirun's output: the bytes of each rank and stream, and mpirun's own report of the job's end.

``mpirun --output tag:raw`` writes ``[1,0]<stdout>: `` in front of everything that a rank writes, as it comes, so that
a progress bar shows at once. Its own reports stand between two lines of dashes, without a tag.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from hvdkit.environments import limits

_TAG = rb"\[\d+,(?P<rank>\d+)\]<(?P<stream>stdout|stderr|stddiag)>: "
_PARTIAL_TAG = re.compile(rb"\[(\d+(,(\d+(\](<([a-z]*(>:?)?)?)?)?)?)?)?\Z")
_DASHES = rb"-{60,76}"
_TAG_OR_REPORT = re.compile(_TAG + b"|" + _DASHES + rb"\n(?=[^\n]*(?:prte|mpirun|daemon|Open MPI|slots))")
_PARTIAL_REPORT = re.compile(rb"(?:-{1,76}|" + _DASHES + rb"\n[^\n]*)\Z")
_REPORT_END = re.compile(rb"\n" + _DASHES + rb"\n")
# MPI's message when a rank calls for the end of the job.
_ABORTING = re.compile(
    _DASHES + rb"\nMPI_ABORT was invoked on rank \d+ in communicator"
    rb"(?: MPI_COMM_WORLD\n  Proc: \[\[\d+,\d+\],(?P<rank>\d+)\]\n  Errorcode: (?P<code>\d+)\n)?"
)
# The banner that MPI then prints in a rank's name, and what may become a banner at the end of the data. It is left out:
# hvdkitrun says once which rank ended the job, and the zero byte at its end makes grep take a log for a binary file.
_BANNER_BEGIN = b"MPI_ABORT was invoked on rank "
_BANNER = re.compile(_DASHES + rb"\n" + _BANNER_BEGIN + rb".*?\n" + _DASHES + rb"\n\0?", re.DOTALL)
_PARTIAL_BANNER = re.compile(rb"-{1,76}\Z|" + _DASHES + rb"\n")


@dataclass(frozen=True)
class RankFailure:
    """The first rank that failed, as mpirun reports it. ``code`` is negative for a signal."""

    rank: int
    code: int
    host: str | None = None
    how: str = "exited"  # "exited", "aborted" or "left without MPI_Finalize"


class MpirunStream:
    """A parser of one of mpirun's two streams. ``write(rank, stream, data)`` receives what ranks wrote."""

    def __init__(self, write: Callable[[int, str, bytes], None]) -> None:
        self._write = write
        self._source: tuple[int, str] | None = None
        self._buffer = self._latest = self.own_words = b""
        self._in_report = False
        self.aborting = False  # a rank has called for the job's end
        self.aborted: RankFailure | None = None  # that rank and its exit code, once they are read
        self._held: dict[tuple[int, str], bytes] = {}  # data that may begin a banner
        self._after_banner: set[tuple[int, str]] = set()

    def feed(self, data: bytes) -> None:
        """Parse more bytes of mpirun. Bytes that may begin a tag wait for the rest."""
        self._buffer += data
        self._latest = self._latest[-400:] + data
        if self.aborted is None and (match := _ABORTING.search(self._latest)):
            self.aborting = True
            if match["rank"]:
                self.aborted = RankFailure(int(match["rank"]), int(match["code"]), how="aborted")
        while self._step():
            pass

    def close(self) -> None:
        """Hand on what is left, at the end of the stream."""
        self._hand_on(self._buffer)
        self._buffer = b""
        for source, data in self._held.items():
            self._write(*source, data)
        self._held.clear()

    def _step(self) -> bool:
        """Take a report, or the data up to a tag, off the buffer. Return True if more may follow."""
        buffer = self._buffer
        match = (_REPORT_END if self._in_report else _TAG_OR_REPORT).search(buffer)
        if match is None:
            if not self._in_report:
                partial = _PARTIAL_TAG.search(buffer) or _PARTIAL_REPORT.search(buffer)
                keep = len(buffer) if partial is None else partial.start()
                self._hand_on(buffer[:keep])
                self._buffer = buffer[keep:]
            return False
        if self._in_report:
            self.own_words += buffer[: match.end()]
            self._buffer, self._in_report, self._source = buffer[match.end() :], False, None
            return True
        self._hand_on(buffer[: match.start()])
        if match["rank"] is None:
            self._buffer, self._in_report = buffer[match.start() :], True
        else:
            stream = "stdout" if match["stream"] == b"stdout" else "stderr"
            self._source, self._buffer = (int(match["rank"]), stream), buffer[match.end() :]
        return True

    def _hand_on(self, data: bytes) -> None:
        if self._source is None or self._in_report:
            self.own_words += data
        elif data:
            self._write_without_banner(self._source, data)

    def _write_without_banner(self, source: tuple[int, str], data: bytes) -> None:
        if source in self._after_banner:
            self._after_banner.discard(source)
            data = data.removeprefix(b"\0")
        data = self._held.pop(source, b"") + data
        banners = list(_BANNER.finditer(data))
        if banners and banners[-1].end() == len(data):
            self._after_banner.add(source)
        data = _BANNER.sub(b"", data)
        for partial in _PARTIAL_BANNER.finditer(data):
            rest = data[partial.end() :]
            if _BANNER_BEGIN.startswith(rest) or rest.startswith(_BANNER_BEGIN):
                data, self._held[source] = data[: partial.start()], data[partial.start() :]
                break
        if data:
            self._write(*source, data)


def find_shortage(own_words: bytes) -> str | None:
    """Return a sentence about the system's limit that kept mpirun from starting the ranks; None for other reasons."""
    text = own_words.decode(errors="replace")
    if re.search(r"Too many open files|PMIX_ERR_SYS_LIMITS", text):
        return limits.files()
    if re.search(r"pmix_progress_thread_start failed|Resource temporarily unavailable|PRTE_ERR_SYS_LIMITS", text):
        return limits.processes()
    if "Cannot allocate memory" in text:
        return limits.memory()
    if re.search(r"No space left on device|Disk quota exceeded", text):
        folder = re.search(r"Directory: +(\S+)", text)
        return limits.room(folder[1] if folder else "")
    return None


def find_failure(own_words: bytes, status: int) -> RankFailure | None:
    """Return the failure in mpirun's report, None if it names no rank. ``status``: mpirun's exit status."""
    text = " ".join(own_words.decode(errors="replace").split())
    if match := re.search(r"Process name: \[[^\]]*,(\d+)\] Exit code: (\d+)", text):
        return RankFailure(int(match[1]), int(match[2]))
    ways = r'(exited on signal (\d+)|calling "abort"|exiting improperly)'
    match = re.search(rf"process rank (\d+) with PID \d+ on node (\S+) {ways}", text)
    if match is None:
        return None
    rank, host, way = int(match[1]), match[2], match[3]
    if match[4]:
        return RankFailure(rank, -int(match[4]), host)
    return RankFailure(rank, status, host, "aborted" if "abort" in way else "left without MPI_Finalize")
