"""Keep the processes of a job together: carry their output, and let the first that fails, or a signal, end them all.

One thread and one select loop. Every child is a ``worker`` (or an ssh to one) that ends its rank when its standard
input closes; so stopping is closing, and it also happens if this process is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import psutil

from hvdkit.launch import worker
from hvdkit.launch.errors import LaunchError
from hvdkit.launch.output import STREAMS

# From the first failure to the last process gone: SIGTERM at once, SIGKILL from the leash, then from here.
GRACE_SECONDS = 2.5
_LEASH_SECONDS = GRACE_SECONDS + 1.0
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
    """

    command: list[str]
    environment: dict[str, str]
    receive: Callable[[str, bytes], None]
    remote: list[str] = field(default_factory=list)
    pass_fds: tuple[int, ...] = ()
    secret: str = field(default="", repr=False)
    scratch: str = ""
    is_ending: Callable[[], bool] = lambda: False  # whether it has said that it ends

    @property
    def argv(self) -> list[str]:
        """What is started here."""
        return self.remote or list(WORKER)

    def header(self) -> bytes:
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
            "by_signal": not self.remote,
        }
        return json.dumps(header).encode() + b"\n"


@dataclass(frozen=True)
class Outcome:
    """How it ended: by a signal to this process, or with the first child that failed, or well (both None)."""

    signal: int | None = None
    failed: int | None = None  # index of the child
    code: int = 0  # as subprocess has it: negative for a signal


def supervise(children: list[Child]) -> Outcome:
    """Start the children and stay until all have ended."""
    worker.adopt_orphans()
    strangers = {process.pid for process in psutil.Process().children(recursive=True)}
    with _wake_on_signals() as wake:
        run = _Run(children, wake)
        outcome = None
        try:
            outcome = run.loop()
        finally:
            # After success, what has left its rank's process group on purpose may stay.
            if outcome is None or outcome != Outcome():
                run.kill()
                _sweep(strangers)
    return outcome


class _Run:
    """The state of one ``supervise``."""

    def __init__(self, children: list[Child], wake: int) -> None:
        self.children = children
        self.wake = wake
        self.processes: list[subprocess.Popen[bytes]] = []
        self.selector = selectors.DefaultSelector()
        self.selector.register(wake, selectors.EVENT_READ)
        self.open_streams = 0
        self.outcome = Outcome()
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
        is_ending = self.ending_since or self.stopped_at is not None
        return 0.25 if is_ending and not self.killed else None

    def start(self, child: Child) -> None:
        pipe = subprocess.PIPE
        try:
            process = subprocess.Popen(  # noqa: S603 (the worker, or ssh to it)
                child.argv, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True, pass_fds=child.pass_fds
            )
        except OSError as error:
            raise LaunchError(
                f"cannot start {child.argv[0]}: {error}\nHINT: check that it is installed and on PATH"
            ) from error
        for descriptor in child.pass_fds:
            os.close(descriptor)
        self.processes.append(process)
        assert process.stdin is not None
        # A worker that is gone already says so by its exit status.
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(child.header())
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
            if self.stopped_at is None:
                self.outcome = Outcome(signal=number)
                self.stop()
            elif self.outcome.signal is not None:
                self.kill()  # asked a second time

    def note_failures(self) -> None:
        for index, process in enumerate(self.processes):
            code = process.poll()
            if code and self.stopped_at is None:
                self.outcome = Outcome(failed=index, code=code)
                self.stop()

    def note_endless(self, now: float) -> None:
        """End a child that has said that it ends the job, and does not come to it: a host of its may be cut off."""
        for index, (child, process) in enumerate(zip(self.children, self.processes, strict=True)):
            if process.returncode is not None or self.stopped_at is not None or not child.is_ending():
                continue
            if now - self.ending_since.setdefault(index, now) > ENDING_SECONDS:
                self.outcome = Outcome(failed=index, code=1)
                self.stop()

    def stop(self) -> None:
        """Let go of every leash: the workers end what they started."""
        self.stopped_at = time.monotonic()
        for process in self.processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()

    def kill(self) -> None:
        self.killed = True
        for process in self.processes:
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


def _sweep(strangers: set[int]) -> None:
    """Kill every descendant that was not there before."""
    for process in psutil.Process().children(recursive=True):
        if process.pid not in strangers:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
