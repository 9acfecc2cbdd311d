"""A deadline for calls of libraries that know none, and that let no other thread of Python run meanwhile."""

from __future__ import annotations

import faulthandler
from collections.abc import Iterator
from contextlib import contextmanager

STANDARD_ERROR = 2  # sys.stderr may be no file, as in a notebook
LONGEST_SECONDS = 1e6  # that it takes
# If the rank that serves the store of torch.distributed was stopped, the store's own deadlines do not hold: it may take
# so much longer until they are given up on.
LONGEST_ANSWER_SECONDS = 2.0


@contextmanager
def ends_process_after(seconds: float) -> Iterator[None]:
    """End this process, with a traceback and status 1, if what runs in this context is not through by then.

    faulthandler's thread needs no Python. It has one alarm: one that the user set is given up.
    """
    faulthandler.dump_traceback_later(min(seconds, LONGEST_SECONDS), exit=True, file=STANDARD_ERROR)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
