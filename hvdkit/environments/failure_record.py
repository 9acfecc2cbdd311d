"""What a rank tells hvdkitrun of its end: a line on stderr, which hvdkitrun takes out of what the rank prints.

Python prints the traceback of each rank, most of them of ranks that failed because another one had, and most of their
lines of libraries. A mark before it and the record after it let hvdkitrun keep it back, and show what matters of all
ranks together when the job has ended. Who reads the rank's stderr elsewhere finds the traceback as ever.
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
from types import TracebackType

from hvdkit.errors import cut_off

logger = logging.getLogger("hvdkit")

# By this hvdkitrun asks for records. What a rank starts is not asked: nobody might read it.
WANTED = "HVDKIT_FAILURE_RECORDS"
BEGINS = "\x1ehvdkit traceback"
MARK = "\x1ehvdkit failure "
# A rank's worker (launch/worker) tells hvdkitrun in such a line that the rank called hvd.init(), or has ended as told.
NOTE = "\x1ehvdkit note "
INIT, ENDED = "init", "ended"
# Where the rank tells its worker that it calls hvd.init().
INIT_PIPE = "HVDKIT_INIT_PIPE"

ANOTHER = -1  # some rank, and it is not known which

LONGEST_ERROR = 3000  # characters
MOST_FRAMES = 30  # of the user's own files

_HVDKIT = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_PYTHON = tuple(os.path.join(path, "") for name, path in sysconfig.get_paths().items() if name.endswith("stdlib"))
_INSTALLED = re.compile(r"[/\\](?:site|dist)-packages[/\\]")


@dataclass(frozen=True)
class Record:
    """How a rank failed. ``error``: the exception as Python prints it, without the traceback.

    ``frames`` are the lines of the traceback in the user's own files, with how many of libraries come between.
    ``after``: the rank whose loss or leaving this one's failure is due to, ANOTHER if only that is known, None if it is
    nobody's.
    """

    error: str
    frames: str = ""
    after: int | None = None

    def line(self) -> str:
        """As it travels."""
        return f"{MARK}{json.dumps(asdict(self))}\n"


def parse(line: bytes) -> Record | None:
    """The record in a line that a rank wrote; None if there is none that is whole."""
    try:
        found = json.loads(line[len(MARK.encode()) :])
        return Record(**{field.name: found[field.name] for field in fields(Record)})
    except (ValueError, KeyError, TypeError):
        return None


def take_wanted() -> bool:
    """Whether hvdkitrun started this process and asks for a record. What this process starts is not asked."""
    return os.environ.pop(WANTED, "") == "1"


def tell_init() -> None:
    """Tell hvdkitrun, if it started this process, that a process of this rank calls hvd.init()."""
    if path := os.environ.pop(INIT_PIPE, ""):
        try:
            pipe = os.open(path, os.O_WRONLY)
            try:
                if stat.S_ISFIFO(os.fstat(pipe).st_mode):  # else the number is another process's, as in a container
                    os.write(pipe, b"!")
            finally:
                os.close(pipe)
        except OSError as error:  # as in a container of its own
            logger.debug("hvdkitrun is not told of hvd.init(): %s", error)


def of_exception(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None, after: int | None = None
) -> Record:
    """What there is to tell of an exception that ends this process."""
    told = traceback.TracebackException(kind, error, trace)
    only = "".join(told.format_exception_only()).rstrip("\n")
    earlier = told.__cause__ or (None if told.__suppress_context__ else told.__context__)
    if earlier is not None and str(earlier) not in only:
        only += f"\nCaused by {next(iter(earlier.format_exception_only()), '').rstrip()}"
    return Record(cut_off(only, LONGEST_ERROR), "".join(_folded(told.stack)), after)


def is_of_a_library(file: str) -> bool:
    """Whether a file is hvdkit's, of an installed package or of Python."""
    return file.startswith((_HVDKIT, "<frozen ", *_PYTHON)) or _INSTALLED.search(file) is not None


def _folded(stack: traceback.StackSummary) -> Iterator[str]:
    """The frames of the user's own files, and how many others stand between them; all, where there are no own ones.

    Of many, as where a function calls itself without end, the first and the last.
    """
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
    """Write a line where hvdkitrun reads, after what was written to stderr before. Whether that could be done."""
    try:
        if sys.stderr is not None:
            sys.stderr.flush()
        left = memoryview(line.encode(errors="replace"))
        while left:
            try:
                left = left[os.write(2, left) :]
            except BlockingIOError:  # somebody made it so
                select.select([], [2], [])
    except (OSError, ValueError):  # it was closed: there is nobody to tell
        return False
    return True
