"""A deadline for calls of libraries that know none, and that let no other thread of Python run meanwhile.

``faulthandler`` alone would end the process too, but tell neither which rank waited for what nor what to do, and a
thread of Python cannot while MPI starts. Its one alarm may also be the user's.
"""

from __future__ import annotations

import faulthandler
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hvdkit.kernels._native import LastResort

STANDARD_ERROR = 2  # sys.stderr may be no file, as in a notebook
LONGEST_SECONDS = 1e6  # that faulthandler takes
# If the rank that serves the store of torch.distributed was stopped, the store's own deadlines do not hold: it may take
# so much longer until they are given up on.
LONGEST_ANSWER_SECONDS = 2.0
STOPPED = "HINT: see whether that process was stopped, and whether its host can still be reached."


@contextmanager
def ends_process_after(seconds: float, words: str) -> Iterator[None]:
    """End this process, with ``words`` and status 1, if what runs in this context is not through by then."""
    seconds = min(seconds, LONGEST_SECONDS)
    end = _counting_down(seconds, words)
    if end is None:
        # Its thread needs no Python either. It has a traceback for words, and one alarm: one of the user's is given up.
        faulthandler.dump_traceback_later(seconds, exit=True, file=STANDARD_ERROR)
    try:
        yield
    finally:
        if end is None:
            faulthandler.cancel_dump_traceback_later()
        else:
            end.cancel()


def _counting_down(seconds: float, words: str) -> LastResort | None:
    try:
        from hvdkit.kernels._native import LastResort
    except ImportError:
        return None
    return LastResort(seconds, f"hvdkit: {words}\n")
