"""What a rank tells hvdkitrun of its end: a line on stderr, which hvdkitrun takes out of what the rank prints.

Python prints the traceback of each rank, most of them of ranks that failed because another one had, and most of their
lines of libraries. A mark before it and the record after it let hvdkitrun keep it back, and show what matters of all
ranks together when the job has ended. Who reads the rank's stderr elsewhere finds the traceback as ever.
"""

from __future__ import annotations

import json
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from types import TracebackType

# By this hvdkitrun asks for records. What a rank starts is not asked: nobody might read it.
WANTED = "HVDKIT_FAILURE_RECORDS"
BEGINS = "\x1ehvdkit traceback"
ANOTHER = -1
MARK = "\x1ehvdkit failure "

_HVDKIT = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_LIBRARIES = tuple(
    os.path.join(path, "")
    for name, path in sysconfig.get_paths().items()
    if name in ("stdlib", "platstdlib", "purelib", "platlib")
)


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


def of_exception(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None, after: int | None = None
) -> Record:
    """What there is to tell of an exception that ends this process."""
    told = traceback.TracebackException(kind, error, trace)
    only = "".join(told.format_exception_only()).rstrip("\n")
    earlier = told.__cause__ or (None if told.__suppress_context__ else told.__context__)
    if earlier is not None:
        only += f"\nIt came of {next(iter(earlier.format_exception_only()), '').rstrip()}"
    return Record(only, "".join(_folded(told.stack)), after)


def is_of_a_library(file: str) -> bool:
    """Whether a file is hvdkit's, of an installed package or of Python."""
    return file.startswith((_HVDKIT, "<frozen ", *_LIBRARIES))


def _folded(stack: traceback.StackSummary) -> Iterator[str]:
    """The frames of the user's own files, and how many others stand between them; all, where there are no own ones."""
    own = [not is_of_a_library(frame.filename) for frame in stack]
    if not any(own):
        yield from stack.format()
        return
    others = 0
    for frame, is_own in zip(stack, own, strict=True):
        if not is_own:
            others += 1
            continue
        yield from _others(others)
        others = 0
        yield f'  File "{frame.filename}", line {frame.lineno}, in {frame.name}\n'
        if frame.line:
            yield f"    {frame.line}\n"
    yield from _others(others)


def _others(count: int) -> Iterator[str]:
    if count:
        yield f"  ... {count} line{'s' if count > 1 else ''} in libraries\n"


def send(line: str) -> None:
    """Write a line where hvdkitrun reads, after what was written to stderr before."""
    if sys.stderr is not None:
        sys.stderr.flush()
    left = memoryview(line.encode(errors="replace"))
    while left:
        left = left[os.write(2, left) :]
