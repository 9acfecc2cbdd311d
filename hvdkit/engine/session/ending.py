"""The end of the process: a rank that fails ends the job with its exit code, so that no rank waits for it."""

from __future__ import annotations

import atexit
import functools
import logging
import os
import sys
from collections.abc import Callable
from time import sleep
from typing import Any

from hvdkit.environments import failure_record
from hvdkit.errors import PeerFailedError, PeerLostError, cut_off, in_words

# A rank that ends because another rank failed gives that rank this time to end the job and to print the reason.
AFTER_ANOTHER_SECONDS = 2.0
_OF_ANOTHER = PeerLostError, PeerFailedError
LONGEST_FACT = 400  # characters of a reason that other ranks get


def exit_status(code: Any) -> int:
    """Return the exit status for an argument of sys.exit(): eight bits, and never 0 for a failure such as 256."""
    number = int(code) if isinstance(code, int) else int(code is not None)
    return (number & 0xFF) or int(number != 0)


def raised(kind: type[BaseException], error: BaseException) -> str:
    """Return an exception as a line for other ranks: the first line of its text, cut off if it is long."""
    fact = next(iter(str(error).splitlines()), "").rstrip(".")
    return f"it raised {kind.__name__}" + (f": {cut_off(fact, LONGEST_FACT)}" if fact else "")


class Ending:
    """The end of this process, as far as Python shows it beforehand: an exception, ``sys.exit``, a lost peer."""

    def __init__(self) -> None:
        self.code, self.reason = 0, ""
        self.another_left = False  # another rank left first, and is the cause if this rank fails
        self.first_code = 0  # the exit code of the rank that failed first, with which any rank ends the job
        self.peer_lost = False  # MPI cannot finalize any more: it would wait for the lost rank
        self._process = os.getpid()
        self.abort: Callable[[int], None] = lambda code: None  # ends the whole job
        self.record_wanted = False  # hvdkitrun waits for a record
        self.renumbered = False  # ranks are not those of the launcher
        self._watched: Callable[[], None] | None = None
        self._first_gone: Callable[[], int | None] = lambda: None
        self._sends_record = False  # hvdkitrun has no record yet
        self._exit: failure_record.Record | None = None  # of the sys.exit() that ends this process
        self._blames_another = False  # this process ends by an exception that another rank caused

    def watch(self, shutdown: Callable[[], None], first_gone: Callable[[], int | None]) -> None:
        """Call ``shutdown`` when the process ends, and note why it ends. Only the first call has an effect.

        ``first_gone`` returns the rank that left the job before this one, None if none has.
        """
        self._process = os.getpid()
        if self._watched is not None:
            return
        self._watched, self._first_gone = shutdown, first_gone
        self._sends_record = self.record_wanted
        atexit.register(self._at_exit)
        previous_hook, previous_exit = sys.excepthook, sys.exit

        def excepthook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
            blamed = self._blamed(error)
            self.code, self.reason = 1, raised(kind, error)
            self._blames_another = blamed is not None
            sends_record = self._sends_record and self._process == os.getpid() and issubclass(kind, Exception)
            if sends_record and previous_hook is sys.__excepthook__:  # the output of another hook is shown as it is
                sends_record = failure_record.sent(f"{failure_record.BEGINS}\n")
            previous_hook(kind, error, trace)
            if sends_record:
                self._sends_record = False
                failure_record.sent(failure_record.of_exception(kind, error, trace, blamed).line())

        def exit_noting(code: Any = None) -> None:
            number = exit_status(code)
            self.forget()  # an earlier call whose SystemExit was caught
            if number:
                self.code, self.reason = number, f"it called sys.exit({cut_off(repr(code), LONGEST_FACT)})"
                self._exit = failure_record.of_exit(
                    self.reason, sys._getframe().f_back, self._blamed(sys.exc_info()[1])
                )
            previous_exit(code)

        sys.excepthook = excepthook
        sys.exit = exit_noting  # type: ignore[assignment]

    def forget(self) -> None:
        """Forget the reason for the end: the process goes on after all."""
        if self.code:
            self.code, self.reason, self._exit = 0, "", None

    @property
    def is_watching(self) -> bool:
        """True if ``watch`` was called, in this process or in one that it was forked from."""
        return self._watched is not None

    def _blamed(self, error: BaseException | None) -> int | None:
        """Return the rank that caused an error here, ANOTHER if it is unknown, None if no other rank caused it."""
        seen: set[int] = set()  # an exception may be its own cause
        while error is not None and not isinstance(error, _OF_ANOTHER) and id(error) not in seen:
            seen.add(id(error))
            error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        if not isinstance(error, _OF_ANOTHER):
            return None
        rank = self._first_gone() if error.rank is None else error.rank
        return failure_record.ANOTHER if rank is None or self.renumbered else rank

    def _at_exit(self) -> None:
        assert self._watched is not None
        if self._process != os.getpid():
            return  # a fork, which must not use the connections
        _flush()
        code_before = self.code
        if self.code and self._sends_record and self._exit is not None:
            failure_record.sent(self._exit.line())
        try:
            self._watched()
        except Exception as error:  # raised, it would be printed, and the process still succeed
            self.code = self.code or 1
            print(in_words(error), file=sys.stderr)
        if self.code and (self.another_left or (self._blames_another and not self.peer_lost)):
            sleep(AFTER_ANOTHER_SECONDS)
        if self.code or self.peer_lost:
            self.abort(self.first_code or self.code or 1)
        if self.code and not code_before:
            logging.shutdown()
            _flush()
            os._exit(self.code)  # Python would exit with success by now, and the launcher must see the failure


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()


ENDING = Ending()
_last_of_all: LastOfAll | None = None


def abort_mpi(code: int) -> None:
    """End an MPI job as a whole: if only this rank ended, the others would stay in MPI_Finalize for good."""
    if "mpi4py.MPI" in sys.modules:
        from mpi4py import MPI

        if MPI.Is_initialized() and not MPI.Is_finalized():
            MPI.COMM_WORLD.Abort(code)


class LastOfAll:
    """Ends a forked child when Python frees its modules, after everything that ``atexit`` calls.

    mpi4py finalises MPI at the very end of Python. In a forked child, which has only a copy of MPI, this waits without
    end for threads that only the parent has, or for the parent's peers.
    """

    def __del__(
        self,
        is_finalizing: Callable[[], bool] = sys.is_finalizing,
        leave: Callable[[int], None] = os._exit,
        ending: object = ENDING,
    ) -> None:
        # Modules are half freed here, so the defaults hold all that is needed. The code is the argument of sys.exit(),
        # or 1 after an exception: the code of `raise SystemExit(code)` is lost by now.
        if is_finalizing():
            leave(ending.code)  # type: ignore[attr-defined]


@functools.cache
def watch_forks() -> None:
    """Have forks of this process, and of its forks, end without MPI. Only the first call has an effect."""

    def begin_child() -> None:
        global _last_of_all
        if "mpi4py.MPI" in sys.modules and ENDING.is_watching:
            ENDING.forget()
            _last_of_all = LastOfAll()

    os.register_at_fork(after_in_child=begin_child)
