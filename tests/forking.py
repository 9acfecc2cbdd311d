"""Children that a rank forks: what they find, and how they end."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress

from tests import measured

HUNG = "hung"
ENDS_WITHIN_SECONDS = 30  # a child that hangs does for ever


def status_of(child: int) -> int | str:
    """The exit status of a child, or HUNG, in which case it is killed."""
    handle = os.pidfd_open(child)
    deadline = time.monotonic() + ENDS_WITHIN_SECONDS
    with suppress(ChildProcessError):
        while time.monotonic() < deadline:
            found, status = os.waitpid(child, os.WNOHANG)
            if found:
                os.close(handle)
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.01)
    signal.pidfd_send_signal(handle, signal.SIGKILL)
    os.close(handle)
    os.waitpid(child, 0)
    return HUNG


def forked(check: Callable[[], None], at_once: Callable[[], object] = lambda: None) -> Callable[[], None]:
    """Fork a child, which runs ``check`` when what is returned is called here, and ends without Python's clean-up.

    Fails then where the check does, or hangs. ``at_once`` runs in the child before.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            at_once()
            os.read(reading, 1)
            check()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            measured.exited(status)

    def run() -> None:
        os.write(writing, b".")
        for descriptor in (reading, writing):
            os.close(descriptor)
        assert status_of(child) == 0, "see what the child printed"

    return run


def in_child(check: Callable[[], None]) -> None:
    """Run ``check`` in a forked child, which ends without Python's clean-up; fails where it does, or hangs."""
    forked(check)()
