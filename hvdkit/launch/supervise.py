"""The supervisor of a job's processes: it carries their output, and ends all at the first failure or at a signal.

Every child is a ``worker``, or an ssh to a worker, that ends its rank when its standard input closes. So the supervisor
stops a job by closing pipes, which also happens if it is killed.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from subprocess import PIPE
from typing import Any

import psutil

from hvdkit.environments import limits
from hvdkit.launch import LaunchError, process_tree, worker
from hvdkit.launch.output import STREAMS

# From the first failure to the last process gone: SIGTERM at once, SIGKILL from the worker, then from here.
GRACE_SECONDS = 2.5
_WORKER_SECONDS = GRACE_SECONDS + 1.0
_LATE_SECONDS = 1.0  # for the workers' own SIGKILL after the grace period of ``--stop-grace``
ENDING_SECONDS = 10.0  # for an mpirun that announced its end: it waits for ever for a host that was cut off
_DRAIN_SECONDS = 1.0  # for output that is on its way when all children have ended

WORKER = (sys.executable, "-I", "-S", worker.__file__)


@dataclass
class Child:
    """A worker to start."""

    command: list[str]  # of the rank, or of mpirun, as its environment
    environment: dict[str, str]
    receive: Callable[[str, bytes], None] = lambda stream, data: None  # called with a stream's name and its bytes
    remote: list[str] = field(default_factory=list)  # the ssh command that starts the worker, if it is elsewhere
    pass_fds: tuple[int, ...] = ()  # descriptors that the command gets; they are closed here when it has started
    secret: str = field(default="", repr=False)  # goes to the worker by standard input, and to the command in a file
    function: str = field(default="", repr=False)  # of hvdkit.run, in base 64; goes the same way
    scratch: str = ""  # a folder of the command that its worker removes, even if this process was killed
    is_ending: Callable[[], bool] = lambda: False  # for mpirun: True once it has announced its end
    has_ended: Callable[[], bool] | None = None  # for mpirun: True once each of its ranks has ended when asked to

    def header(self, stop_grace: float) -> dict[str, Any]:
        """Return the first line of the worker's input, as an object of JSON."""
        return {
            "command": self.command,
            "environment": self.environment,
            "pass_fds": self.pass_fds,
            "secret": self.secret,
            "function": self.function,
            "scratch": self.scratch,
            "folder": os.getcwd(),
            # A rank that rescues its state needs the time also where its launcher is gone.
            "graces": (stop_grace if self.environment.get("HVDKIT_RESCUE") else GRACE_SECONDS, stop_grace),
            "relays": self.has_ended is not None,
            "is_remote": bool(self.remote),
        }


@dataclass(frozen=True)
class Outcome:
    """The end of a job: by a signal to this process, by the first child that failed, or well (both None)."""

    signal: int | None = None
    failed: int | None = None  # index of the child
    code: int = 0  # as in subprocess: negative for a signal
    at: float = field(default=math.inf, compare=False)  # monotonic time from which the other children are ended


def supervise(children: list[Child], stop_grace: float) -> Outcome:
    """Start the children and stay until all have ended. ``stop_grace``: the seconds that SIGTERM leaves to ranks."""
    process_tree.adopt_orphans()
    with signals_as_bytes() as wake:
        supervisor, outcome = _Supervisor(children, wake, stop_grace), None
        try:
            outcome = supervisor.loop()
        finally:
            # After success, processes that left their rank's process group on purpose may stay.
            if outcome != Outcome():
                supervisor.kill()
    return outcome


@contextlib.contextmanager
def signals_as_bytes() -> Iterator[int]:
    """Have SIGCHLD and the signals that stop a job arrive as bytes at a descriptor, which is yielded."""
    # nohup ignores SIGHUP, and a shell ignores SIGINT for what it starts in the background.
    signals = [number for number in worker.STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    handlers = {number: signal.getsignal(number) for number in (signal.SIGCHLD, *signals)}
    wake = worker.wake_on_signals(signals)
    try:
        yield wake
    finally:
        for number, handler in handlers.items():  # so that signals end the reports that follow
            signal.signal(number, handler)
        os.close(signal.set_wakeup_fd(-1))
        os.close(wake)


class _Supervisor:
    """The state of a call of ``supervise``."""

    def __init__(self, children: list[Child], wake: int, stop_grace: float) -> None:
        self.children, self.wake, self.stop_grace = children, wake, stop_grace
        self.strangers = {process.pid for process in psutil.Process().children(recursive=True)}
        self.processes: list[subprocess.Popen[bytes]] = []
        self.selector = selectors.DefaultSelector()
        self.selector.register(wake, selectors.EVENT_READ)
        self.open_streams = 0
        self.outcome = Outcome()
        self.stop_at: float | None = None  # when ranks that may save until then must have ended
        self.stopped_at: float | None = None
        self.killed = False
        self.ending_since: dict[int, float] = {}

    def loop(self) -> Outcome:
        for child in self.children:
            self.start(child)
        ended_at = math.inf
        while True:
            has_deadline = ended_at < math.inf or ((self.ending_since or self.is_stopping) and not self.killed)
            self.read(0.1 if has_deadline else None)
            now = time.monotonic()
            self.note_ends(now)
            if self.stopped_at is not None and now - self.stopped_at > _WORKER_SECONDS and not self.killed:
                self.kill()
            if all(process.returncode is not None for process in self.processes):
                ended_at = min(ended_at, now)
                # A process that left its group may hold a pipe open for ever.
                if self.open_streams == 0 or now - ended_at > _DRAIN_SECONDS:
                    return self.outcome

    def start(self, child: Child) -> None:
        command = child.remote or WORKER
        try:
            process = subprocess.Popen(  # noqa: S603 (the worker, or ssh to it)
                command, stdin=PIPE, stdout=PIPE, stderr=PIPE, start_new_session=True, pass_fds=child.pass_fds
            )
        except OSError as error:
            words = limits.exhausted(error) or f"{error}\nHINT: check that it is installed and on PATH"
            raise LaunchError(f"cannot start {command[0]}: {words}") from error
        for descriptor in child.pass_fds:
            os.close(descriptor)
        self.processes.append(process)
        _write(process, json.dumps(child.header(self.stop_grace)).encode() + b"\n")
        for stream, file in zip(STREAMS, (process.stdout, process.stderr), strict=True):
            assert file is not None
            self.selector.register(file, selectors.EVENT_READ, (child, stream))
            self.open_streams += 1

    def read(self, timeout: float | None) -> None:
        """Hand on what the children printed, and note signals."""
        for key, _ in self.selector.select(timeout):
            data = os.read(key.fd, 65536)
            if key.fd == self.wake:
                self.note_signals(data)
            elif data:
                child, stream = key.data
                child.receive(stream, data)
            else:
                self.selector.unregister(key.fileobj)
                self.open_streams -= 1

    def note_signals(self, numbers: bytes) -> None:
        for number in numbers:
            if number not in worker.STOP_SIGNALS:
                continue  # SIGCHLD: a poll will show the child
            if not self.is_stopping:
                self.outcome = Outcome(signal=number)
                if number != signal.SIGTERM:
                    self.stop()
                    continue
                # The workers send SIGTERM to their ranks, and SIGKILL after the grace period.
                self.stop_at = time.monotonic() + self.stop_grace + _LATE_SECONDS
                for process in self.processes:
                    _write(process, worker.STOP)
            elif self.outcome.signal is not None:
                self.kill()  # on a second signal

    def note_ends(self, now: float) -> None:
        """End the job where a child failed or does not end, and where ranks have saved, or had the time to."""
        for index, (child, process) in enumerate(zip(self.children, self.processes, strict=True)):
            code = process.poll()
            # A host may be cut off for which mpirun waits after it announced its end.
            if code is None and not self.is_stopping and child.is_ending():
                code = 1 if now - self.ending_since.setdefault(index, now) > ENDING_SECONDS else None
            if code and not self.is_stopping:
                self.outcome = Outcome(failed=index, code=code)
                self.stop()
        if self.stop_at is not None and self.stopped_at is None:
            have_saved = any(child.has_ended is not None and child.has_ended() for child in self.children)
            if have_saved or now > self.stop_at:
                self.stop()

    @property
    def is_stopping(self) -> bool:
        """True once the job ends, for whatever reason."""
        return self.stop_at is not None or self.stopped_at is not None

    def stop(self) -> None:
        """Close the workers' input: they end what they started."""
        self.stopped_at = time.monotonic()
        self.outcome = replace(self.outcome, at=self.stopped_at)
        for process in self.processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()

    def kill(self) -> None:
        """Kill the workers and what they have started here."""
        self.killed = True
        for process in psutil.Process().children(recursive=True):
            if process.pid not in self.strangers:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()


def _write(process: subprocess.Popen[bytes], data: bytes) -> None:
    """Write to a worker. A worker that has ended already tells why by its exit status."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(data)
        process.stdin.flush()
