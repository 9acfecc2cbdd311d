"""Keep the processes of a job together: carry their output, and let the first that fails, or a signal, end them all.

One thread and one select loop. Every child is a ``worker`` (or an ssh to one) that ends its rank when its standard
input closes; so stopping is closing, and it also happens if this process is killed.
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
from typing import Any

import psutil

from hvdkit.environments import limits
from hvdkit.launch import worker
from hvdkit.launch.errors import LaunchError
from hvdkit.launch.output import STREAMS

# From the first failure to the last process gone: SIGTERM at once, SIGKILL from the leash, then from here.
GRACE_SECONDS = 2.5
_LEASH_SECONDS = GRACE_SECONDS + 1.0
_LATE_SECONDS = 1.0  # for the workers' own SIGKILL after the grace period of ``--stop-grace``
# How long what has said that it ends may take: mpirun waits for ever for a host that was cut off.
ENDING_SECONDS = 10.0
_DRAIN_SECONDS = 1.0  # for output still on its way when all children have ended

WORKER = (sys.executable, "-I", "-S", worker.__file__)


@dataclass
class Child:
    """A worker to start. ``remote`` is the ssh command in front of it, empty for this machine.

    ``secret`` goes to the worker with the header, by its standard input, and from there to the command in a file.
    ``pass_fds`` are descriptors that the command gets; they are closed here when it has started.
    ``scratch`` is a folder of the command's, which goes with it, also where nobody here is left to remove it.
    ``has_ended`` is given for mpirun alone: True once each of its ranks has told that it has ended as it was told to.
    """

    command: list[str]
    environment: dict[str, str]
    receive: Callable[[str, bytes], None]
    remote: list[str] = field(default_factory=list)
    pass_fds: tuple[int, ...] = ()
    secret: str = field(default="", repr=False)
    scratch: str = ""
    is_ending: Callable[[], bool] = lambda: False  # whether it has said that it ends
    has_ended: Callable[[], bool] | None = None

    @property
    def argv(self) -> list[str]:
        """What is started here."""
        return self.remote or list(WORKER)

    def header(self, stop_grace: float) -> bytes:
        """What the worker reads first."""
        header: dict[str, Any] = {
            "command": self.command,
            "environment": self.environment,
            "keep_environment": bool(self.remote),
            "folder": os.getcwd(),
            "pass_fds": self.pass_fds,
            "secret": self.secret,
            "scratch": self.scratch,
            "grace": GRACE_SECONDS,
            "stop_grace": stop_grace,
            "relays": self.has_ended is not None,
            "by_signal": not self.remote,
        }
        return json.dumps(header).encode() + b"\n"


@dataclass(frozen=True)
class Outcome:
    """How it ended: by a signal to this process, or with the first child that failed, or well (both None)."""

    signal: int | None = None
    failed: int | None = None  # index of the child
    code: int = 0  # as subprocess has it: negative for a signal
    at: float = field(default=math.inf, compare=False)  # monotonic time from which the other children are ended


def supervise(children: list[Child], stop_grace: float) -> Outcome:
    """Start the children and stay until all have ended. ``stop_grace``: the seconds that SIGTERM leaves to ranks."""
    worker.adopt_orphans()
    with _wake_on_signals() as wake:
        run = _Run(children, wake, stop_grace)
        outcome = None
        try:
            outcome = run.loop()
        finally:
            # After success, what has left its rank's process group on purpose may stay.
            if outcome is None or outcome != Outcome():
                run.kill()
    return outcome


class _Run:
    """The state of one ``supervise``."""

    def __init__(self, children: list[Child], wake: int, stop_grace: float) -> None:
        self.children = children
        self.wake = wake
        self.stop_grace = stop_grace
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
        ended_at: float | None = None
        while True:
            self.read(timeout=self.patience(ended_at))
            self.note_failures()
            now = time.monotonic()
            self.note_endless(now)
            self.note_saved(now)
            if self.stopped_at is not None and now - self.stopped_at > _LEASH_SECONDS and not self.killed:
                self.kill()
            if all(process.returncode is not None for process in self.processes):
                ended_at = now if ended_at is None else ended_at
                # A process that left its group may hold a pipe open for ever.
                if self.open_streams == 0 or now - ended_at > _DRAIN_SECONDS:
                    return self.outcome

    def patience(self, ended_at: float | None) -> float | None:
        """How long to wait for something to happen."""
        if ended_at is not None:
            return 0.1
        is_ending = self.ending_since or self.is_stopping
        return 0.25 if is_ending and not self.killed else None

    def start(self, child: Child) -> None:
        pipe = subprocess.PIPE
        try:
            process = subprocess.Popen(  # noqa: S603 (the worker, or ssh to it)
                child.argv, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True, pass_fds=child.pass_fds
            )
        except OSError as error:
            words = limits.exhausted(error) or f"{error}\nHINT: check that it is installed and on PATH"
            raise LaunchError(f"cannot start {child.argv[0]}: {words}") from error
        for descriptor in child.pass_fds:
            os.close(descriptor)
        self.processes.append(process)
        assert process.stdin is not None
        # A worker that is gone already says so by its exit status.
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(child.header(self.stop_grace))
            process.stdin.flush()
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
                continue  # SIGCHLD: a poll will show who
            if not self.is_stopping:
                self.outcome = Outcome(signal=number)
                if number == signal.SIGTERM:
                    self.let_save()
                else:
                    self.stop()
            elif self.outcome.signal is not None:
                self.kill()  # asked a second time

    def note_failures(self) -> None:
        for index, process in enumerate(self.processes):
            code = process.poll()
            if code and not self.is_stopping:
                self.outcome = Outcome(failed=index, code=code)
                self.stop()

    def note_endless(self, now: float) -> None:
        """End a child that has said that it ends the job, and does not come to it: a host of its may be cut off."""
        for index, (child, process) in enumerate(zip(self.children, self.processes, strict=True)):
            if process.returncode is not None or self.is_stopping or not child.is_ending():
                continue
            if now - self.ending_since.setdefault(index, now) > ENDING_SECONDS:
                self.outcome = Outcome(failed=index, code=1)
                self.stop()

    def note_saved(self, now: float) -> None:
        """End what is left after the grace period, and an mpirun whose ranks have ended."""
        if self.stop_at is None or self.stopped_at is not None:
            return
        mpirun_can_end = any(child.has_ended is not None and child.has_ended() for child in self.children)
        if mpirun_can_end or now > self.stop_at:
            self.stop()

    @property
    def is_stopping(self) -> bool:
        """True once the job ends, whatever for."""
        return self.stop_at is not None or self.stopped_at is not None

    def let_save(self) -> None:
        """Tell the workers to send SIGTERM to their ranks, and SIGKILL after the grace period."""
        self.stop_at = time.monotonic() + self.stop_grace + _LATE_SECONDS
        for process in self.processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(worker.STOP)
                process.stdin.flush()

    def stop(self) -> None:
        """Let go of every leash: the workers end what they started."""
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


@contextlib.contextmanager
def _wake_on_signals() -> Iterator[int]:
    """A descriptor on which the numbers of signals arrive as bytes, so that none falls between two system calls."""
    receiving, sending = os.pipe()
    os.set_blocking(sending, False)
    numbers = (signal.SIGCHLD, *worker.STOP_SIGNALS)
    before = {number: signal.getsignal(number) for number in numbers}
    previous = signal.set_wakeup_fd(sending, warn_on_full_buffer=False)
    for number in numbers:
        # nohup ignores SIGHUP, and a shell ignores SIGINT for what it starts in the background.
        if before[number] is not signal.SIG_IGN or number == signal.SIGCHLD:
            signal.signal(number, lambda number, frame: None)
    try:
        yield receiving
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(previous)
        os.close(receiving)
        os.close(sending)
