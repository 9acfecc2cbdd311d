"""A forked child of a rank ends by itself: MPI, which the child has only a copy of, is not finalised in it."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable

from hvdkit.engine.session.ending import ENDING

_last_of_all: LastOfAll | None = None


class LastOfAll:
    """Ends the process where Python lets go of it, in the midst of modules, after all that ``atexit`` calls.

    mpi4py has MPI finalised at the very end of Python. In a forked child that waits without end for threads that only
    its parent has, or for the parent's own peers.
    """

    def __del__(
        self,
        is_finalizing: Callable[[], bool] = sys.is_finalizing,
        leave: Callable[[int], None] = os._exit,
        ending: object = ENDING,
    ) -> None:
        # Modules are half gone now, so all that is needed is in the defaults. The code is what sys.exit() was called
        # with, or 1 after an exception: what `raise SystemExit(code)` left is known to nobody any more.
        if is_finalizing():
            leave(ending.code)  # type: ignore[attr-defined]


def _begin_child() -> None:
    global _last_of_all
    if "mpi4py.MPI" in sys.modules and ENDING.is_watching:
        ENDING.forget()
        _last_of_all = LastOfAll()


@functools.cache
def watch_forks() -> None:
    """From now on every fork of this process, and of its forks, is a child in this sense. Once is enough."""
    os.register_at_fork(after_in_child=_begin_child)
