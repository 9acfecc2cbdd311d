"""Horovod's engine in this process: its native part is loaded as it is, without a line of Horovod's Python.

So it makes no difference what ``import horovod`` gives here (see ``hvdkit.as_horovod``), and the process does not wait
at its end, without a deadline, as Horovod's Python would have it.
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import sys
import threading
from collections.abc import Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from time import sleep
from typing import Any

from hvdkit.environments.libraries import for_a_while, horovod_variables
from hvdkit.transports.waiters import TimedCall

logger = logging.getLogger("hvdkit")

THREAD = "hvdkit-horovod-call"
_NAME = "mpi_lib_v2"  # as Horovod calls it, which its entry point follows
SHORTEST_PAUSE, LONGEST_PAUSE = 50e-6, 1e-3

# The reason that surprises nobody who did not ask for Horovod.
NOT_INSTALLED = "Horovod is not installed with its native part for PyTorch"


def find_native_part() -> Path | None:
    """The file of Horovod's native part for PyTorch, which is there where Horovod was built for it."""
    for folder in sys.path:
        path = Path(folder, "horovod", "torch", _NAME + EXTENSION_SUFFIXES[0])
        if path.is_file():
            return path
    return None


class NativeHorovod:
    """The library. There is one in a process, with one engine, which may be started again once it has stopped."""

    def __init__(self, path: Path) -> None:
        """Raises ImportError or OSError where it was built for another PyTorch or MPI than there is."""
        spec = importlib.util.spec_from_file_location(_NAME, path)
        assert spec is not None, path
        assert spec.loader is not None, path
        self.operations: Any = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.operations)
        self._calls = ctypes.CDLL(str(path))
        self._calls.horovod_init.restype = ctypes.c_bool
        assert self._calls.horovod_add_process_set, "an AttributeError: before 0.23, operations had other arguments"
        self._stuck = ""
        self._was_given_ranks = False
        self._stopping = threading.Event()
        self._shutdown: TimedCall[Any] | None = None

    @property
    def controllers(self) -> list[str]:
        """How the ranks of this library's engine can talk."""
        return [name for name in ("mpi", "gloo") if getattr(self._calls, f"horovod_{name}_built")()]

    def problem(self) -> str:
        """Why the engine cannot be started in this process; "" where it can."""
        if self._stuck:
            return self._stuck
        return "Horovod was started in this process by somebody else" if self._calls.horovod_is_initialized() else ""

    def needs_ranks(self, ranks: list[int]) -> bool:
        """Whether Horovod must be told which of MPI's ranks these are.

        All of MPI's it takes by itself, for which Open MPI need not ask mpirun; but never again once it was told some:
        it keeps those. All ranks of a job must do the same.
        """
        from mpi4py import MPI

        return self._was_given_ranks or ranks != list(range(MPI.COMM_WORLD.Get_size()))

    def start(
        self,
        controller: str,
        rank: int,
        size: int,
        members: list[int],
        meeting: tuple[str, int] | None,
        timeout_seconds: float,
        silence_seconds: float,
        interface: str = "",
    ) -> str:
        """Start the engine with all ``size`` ranks. "", or why it failed.

        ``members``: which of MPI's ranks these are, if MPI is the controller; none: all of them.
        ``timeout_seconds``: how long this may take; ``silence_seconds``: how long Gloo's ranks may be silent later;
        ``interface``: Gloo's, if the user names none.
        """
        self._stopping.clear()
        self._was_given_ranks |= bool(members)
        self._shutdown = TimedCall(self._calls.horovod_shutdown, THREAD)
        numbers = (ctypes.c_int * len(members))(*members)
        start = TimedCall(lambda: bool(self._calls.horovod_init(numbers, len(members), None, None, 0)), THREAD)
        with for_a_while(horovod_variables(controller, rank, size, meeting, silence_seconds, interface)):
            if not start.within(timeout_seconds):
                self._stuck = f"it was not ready after {timeout_seconds:g} s (HVDKIT_START_TIMEOUT_SECONDS)"
                return self._stuck
        if not start.result():
            return "it refused"
        seen = self._calls.horovod_rank(), self._calls.horovod_size()
        if seen != (rank, size):
            return f"it takes rank {rank} of {size} for rank {seen[0]} of {seen[1]}, so it uses another MPI"
        return ""

    def stop(self, timeout_seconds: float) -> None:
        """Stop the engine. What is in flight fails, here and on all other ranks."""
        self._stopping.set()
        shutdown, self._shutdown = self._shutdown, None
        if not self._stuck and shutdown is not None and not shutdown.within(timeout_seconds):
            self._stuck = "Horovod's engine of a former job still waits for a rank that was lost"
            logger.debug("Horovod's engine did not stop within %g s", timeout_seconds)

    def wait(self, handle: int) -> None:
        """Block until an operation is done. Raises RuntimeError where it failed or the engine is being stopped.

        Horovod's own wait would keep a core busy.
        """
        pause = SHORTEST_PAUSE
        while not self.operations.horovod_torch_poll(handle):
            if self._stopping.is_set():
                raise RuntimeError("Horovod's engine was stopped on this rank")
            sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        self.operations.horovod_torch_wait_and_clear(handle)

    def stopping_within(self, seconds: float) -> bool:
        """Sleep, unless the engine is being stopped; whether it is."""
        return self._stopping.wait(seconds)


_loaded: list[NativeHorovod] = []


def load(path: Path) -> NativeHorovod:
    """The library of this process. Raises ImportError or OSError where it cannot be loaded."""
    if not _loaded:
        _loaded.append(NativeHorovod(path))
    return _loaded[0]


def common_problem(reports: Sequence[dict[str, Any]]) -> str:
    """What stands in the way of Horovod's engine, from what every rank told; "" if nothing does."""
    problems = {rank: one["problem"] for rank, one in enumerate(reports) if one["problem"]}
    if len(problems) == len(reports) and len(set(problems.values())) == 1:
        return str(reports[0]["problem"])
    if problems:
        rank = min(problems)
        return f"rank {rank}: {problems[rank]}"
    controllers = [one["controller"] for one in reports]
    if len(set(controllers)) > 1:
        return f"Horovod was built in different ways: its ranks would talk by {controllers}"
    return ""
