"""The lines on stderr in which a rank tells hvdkitrun of its failure, before and after the traceback.

hvdkitrun takes them out, and keeps the traceback until the job's end. Other readers of stderr get it as usual.
"""

from __future__ import annotations

import json
import logging
import os
import re
import select
import stat
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from types import FrameType, TracebackType

from hvdkit.errors import cut_off

logger = logging.getLogger("hvdkit")

# hvdkitrun sets this variable to get records. A rank removes it, since nobody may read the stderr of its children.
WANTED = "HVDKIT_FAILURE_RECORDS"
INIT_PIPE = "HVDKIT_INIT_PIPE"  # on which the rank tells its worker that it calls hvd.init()
BEGINS, MARK = "\x1ehvdkit traceback", "\x1ehvdkit failure "
# A rank's worker (launch/worker) writes such a line when the rank called hvd.init(), or ended as it was asked to.
NOTE, INIT, ENDED = "\x1ehvdkit note ", "init", "ended"
CODE = "code"  # such a note has the exit code of a rank that failed under mpirun, as in subprocess
RESULT = "result"  # such a note has a part of the result of a function that hvdkit.run runs
ANOTHER = -1  # an unknown rank
LONGEST_ERROR = 3000  # characters
MOST_FRAMES = 30  # of the user's own files

_HVDKIT = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_PYTHON = tuple(os.path.join(path, "") for name, path in sysconfig.get_paths().items() if name.endswith("stdlib"))
_INSTALLED = re.compile(r"[/\\](?:site|dist)-packages[/\\]")


@dataclass(frozen=True)
class Record:
    """The failure of a rank."""

    error: str  # the exception as Python prints it, without the traceback
    frames: str = ""  # the traceback's lines in the user's own files, with the number of library lines between them
    after: int | None = None  # the rank that caused it by its loss or leaving, ANOTHER if it is unknown

    def line(self) -> str:
        """Return the record as a line of output."""
        return f"{MARK}{json.dumps(asdict(self))}\n"


def parse(line: bytes) -> Record | None:
    """Return the record in a line that a rank wrote, None if the record is not whole."""
    try:
        values = json.loads(line[len(MARK.encode()) :])
        return Record(**{field.name: values[field.name] for field in fields(Record)})
    except (ValueError, KeyError, TypeError):
        return None


def take_wanted() -> bool:
    """True if hvdkitrun started this process and wants a record. Children of this process inherit no such request."""
    return os.environ.pop(WANTED, "") == "1"


def tell_init() -> None:
    """Tell hvdkitrun, if it started this process, that a process of this rank joins the job."""
    if path := os.environ.pop(INIT_PIPE, ""):
        try:
            with open(os.open(path, os.O_WRONLY), "wb", buffering=0) as pipe:
                if stat.S_ISFIFO(os.fstat(pipe.fileno()).st_mode):  # a container has a /proc of its own
                    pipe.write(b"!")
        except OSError as error:
            logger.debug("hvdkitrun could not be told of hvd.init(): %s", error)


def of_exception(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None, after: int | None = None
) -> Record:
    """Return the record of an exception that ends this process."""
    report = traceback.TracebackException(kind, error, trace)
    text = "".join(report.format_exception_only()).rstrip("\n")
    cause = report.__cause__ or (None if report.__suppress_context__ else report.__context__)
    if cause is not None and str(cause) not in text:
        text += f"\nCaused by {next(iter(cause.format_exception_only()), '').rstrip()}"
    return Record(cut_off(text, LONGEST_ERROR), "".join(_folded(report.stack)), after)


def of_exit(reason: str, frame: FrameType | None, after: int | None = None) -> Record:
    """Return the record of a call of sys.exit() in ``frame``, with the lines of the user's own files that led there.

    ``frame`` is None if no function of Python made the call, as in ``atexit.register(sys.exit, 3)``.
    """
    stack = traceback.StackSummary.extract([] if frame is None else reversed(list(traceback.walk_stack(frame))))
    has_own = not all(is_of_a_library(each.filename) for each in stack)
    return Record(reason, "".join(_folded(stack)) if has_own else "", after)


def is_of_a_library(file: str) -> bool:
    """True if a file belongs to hvdkit, an installed package or Python."""
    return file.startswith((_HVDKIT, "<frozen ", *_PYTHON)) or _INSTALLED.search(file) is not None


def _folded(stack: traceback.StackSummary) -> Iterator[str]:
    """Yield the frames of the user's own files, the first and last of very many; all frames if none is own."""
    is_own = [not is_of_a_library(frame.filename) for frame in stack]
    shown = [index for index, own in enumerate(is_own) if own or not any(is_own)]
    if len(shown) > MOST_FRAMES:
        shown = shown[: MOST_FRAMES // 2] + shown[-MOST_FRAMES // 2 :]
    after = -1
    for index in [*shown, len(stack)]:
        if skipped := index - after - 1:
            where = "more" if any(is_own[after + 1 : index]) else "in libraries"
            yield f"  ... {skipped} line{'s' if skipped > 1 else ''} {where}\n"
        after = index
        if index < len(stack):
            frame = stack[index]
            yield f'  File "{frame.filename}", line {frame.lineno}, in {frame.name}\n'
            if frame.line:
                yield f"    {frame.line}\n"


def sent(line: str) -> bool:
    """Write a line to hvdkitrun, after all earlier output to stderr. Return True if that succeeded."""
    try:
        if sys.stderr is not None:
            sys.stderr.flush()
        write_all(2, line.encode(errors="replace"))
    except (OSError, ValueError):  # stderr is closed
        return False
    return True


def write_all(descriptor: int, data: bytes) -> None:
    """Write to a pipe or terminal, also if it was made non-blocking.

    Python's own buffered writer loses bytes where signals, such as hvdkitrun's SIGCHLD, interrupt it.
    """
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(descriptor, rest) :]
        except BlockingIOError:
            select.select([], [descriptor], [])
