"""A deadline for library calls that have none and let no other Python thread run.

``faulthandler`` would end the process too, but it prints neither which rank waited for what nor what to do, and its
only alarm may be in use by the user. A Python thread cannot run while MPI starts.
"""

from __future__ import annotations

import faulthandler
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hvdkit.kernels._native import LastResort

STANDARD_ERROR = 2  # sys.stderr may be no file, as in a notebook
LONGEST_SECONDS = 1e6  # faulthandler takes no more
# The store of torch.distributed breaks its own deadlines while the rank that serves it is stopped. It is given so many
# seconds more.
LONGEST_ANSWER_SECONDS = 2.0
STOPPED = "HINT: see whether that process was stopped, and whether its host can still be reached."


@contextmanager
def ends_process_after(seconds: float, message: str) -> Iterator[None]:
    """End this process, with ``message`` and status 1, if the block takes longer than ``seconds``."""
    seconds = min(seconds, LONGEST_SECONDS)
    alarm = _native_alarm(seconds, message)
    if alarm is None:
        # This needs no Python either, but prints a traceback instead of the message and replaces an alarm of the user.
        faulthandler.dump_traceback_later(seconds, exit=True, file=STANDARD_ERROR)
    try:
        yield
    finally:
        if alarm is None:
            faulthandler.cancel_dump_traceback_later()
        else:
            alarm.cancel()


def _native_alarm(seconds: float, message: str) -> LastResort | None:
    try:
        from hvdkit.kernels._native import LastResort
    except ImportError:
        return None
    return LastResort(seconds, f"hvdkit: {message}\n")
