"""The ends of a generation of an elastic training: the agreement of ranks on an interrupt, and the order to leave."""

from __future__ import annotations

import contextlib
import signal
from collections import deque
from time import monotonic
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdkit.engine.ops.batch import Handle
from hvdkit.engine.ops.requests import Call, ReduceRequest
from hvdkit.engine.session import runtime
from hvdkit.environments import elastic
from hvdkit.errors import HorovodInternalError
from hvdkit.kernels.reduce_op import ReduceOp

_INTERRUPT = "hvdkit.elastic.interrupt"
QUICK_SECONDS = 1.0  # between two calls that follow each other quickly
AGREEING_SECONDS, MOST_PASSING = 0.25, 16  # between two allreduces of calls that do, and calls without one


class LeaveJob(SystemExit):
    """The order to end this process, once its state is rescued."""


def leave_job() -> LeaveJob:
    """Return the order to end, with the status of SIGTERM where hvdkitrun would take success for the end of the job."""
    return LeaveJob(0 if elastic.launcher() is None else 128 + signal.SIGTERM)


class InterruptAgreement:
    """The agreement of ranks on an interrupt, which all calls in one generation make together.

    A call takes the result of the allreduce that an earlier call has begun, which is there by then. Where calls follow
    each other quickly, some pass without one, since each costs 1 ms of a step. Where they are rare, a call waits for
    its own, so that an interrupt comes soon.
    """

    def __init__(self) -> None:
        self._last: tuple[Handle, npt.NDArray[Any]] | None = None
        self._flag, self._called_at, self._passing, self._waits = False, 0.0, 0, True
        # Between the last calls, of which the longest counts: an epoch may end by two commits in a row.
        self._seconds: deque[float] = deque(maxlen=4)

    def on_any_rank(self, flag: bool) -> bool:
        """Return True on all ranks, at the same call, if it was True on any in this or an earlier call. Collective."""
        now = monotonic()
        self._seconds.append(now - self._called_at)
        self._called_at = now
        self._flag |= flag
        if self._passing:
            self._passing -= 1
            return False
        if self._last is not None:
            handle, numbers = self._last
            handle.wait()
            if numbers[0]:
                return True
            between = float(numbers[1])  # of the slowest rank: the same on all ranks
            self._waits, self._last = between > QUICK_SECONDS, None
            self._passing = min(MOST_PASSING, int(AGREEING_SECONDS / max(between, 1e-6)))
            if self._passing:
                self._passing -= 1
                return False
        numbers = np.array([float(self._flag), max(self._seconds)])
        request, call = ReduceRequest(ReduceOp.MAX), Call(_INTERRUPT, wake=False)
        handle = runtime.engine().named.allreduce([numbers], request, call)
        self._last = handle, numbers
        if self._waits:
            handle.wait()
        return self._waits and bool(numbers[0])

    def finish(self) -> None:
        """Wait for the allreduce that the last call has begun: another function may begin one of that name."""
        if self._last is not None:
            with contextlib.suppress(HorovodInternalError):  # of a rank that is lost after the function has returned
                self._last[0].wait()
