"""The leash: starts one command in a session of its own, and ends it when standard input closes.

``hvdkitrun`` runs this file between itself and every rank, here or by ssh. It holds the other end of standard input, so
when it stops the job, is killed, or the connection breaks, the rank and what the rank started end too. The first line
on standard input is a JSON object that says what to run (and keeps the environment out of what ``ps`` shows). A second
line, ``stop``, gives the command the time to save: SIGTERM goes to the command alone. What the command leaves behind
when it ends, as a shell leaves the program that it ran, gets SIGTERM then. Its other children get none, for a training
whose data loaders are killed cannot save. SIGKILL ends what is left after the grace period.

Under mpirun the file also runs between mpirun and each rank (``python worker.py GRACE COMMAND ...``), since mpirun
itself kills ranks 0.25 s after SIGTERM. There mpirun forwards SIGURG, which stands for ``stop`` and which no other
process minds. A rank that has ended tells so, and its worker stays: mpirun would end the other ranks otherwise.

Only the standard library: the file runs by its path, without hvdkit being importable, and starts in milliseconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Iterator
from typing import Any

PR_SET_CHILD_SUBREAPER = 36
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
STOP = b"stop\n"
# Lines on stderr that hvdkitrun takes out, and a variable, of environments/failure_record: the rank called hvd.init(),
# or has ended as it was told to.
INIT, ENDED = b"\x1ehvdkit note init\n", b"\x1ehvdkit note ended\n"
INIT_PIPE = "HVDKIT_INIT_PIPE"
RELAY = signal.SIGURG
LOOK_SECONDS = 0.5  # between two looks at what is left, and two signals to an mpirun that may not listen yet
# What mpirun forwards to the process group of a rank, and its worker does not die of.
FORWARDED = (
    "TERM",
    "INT",
    "HUP",
    "QUIT",
    "USR1",
    "USR2",
    "ABRT",
    "ALRM",
    "VTALRM",
    "PROF",
    "PWR",
    "XCPU",
    "XFSZ",
    "SYS",
)


def read_header() -> dict[str, Any] | None:
    """The first line of standard input, read byte for byte past any buffer; None if it ends before."""
    line = bytearray()
    while not line.endswith(b"\n"):
        piece = os.read(0, 65536)
        if not piece:
            return None
        line += piece
    header: dict[str, Any] = json.loads(line)
    return header


def offer(secret: str) -> str:
    """Where the command can read the secret: a file without a name, which is gone when this process is.

    Only its user can read it, whatever became of descriptors on the way, and ``ps`` shows where it is, not what it is.
    """
    descriptor = os.memfd_create("hvdkit-secret")
    os.fchmod(descriptor, 0o600)
    os.write(descriptor, secret.encode())
    return f"/proc/{os.getpid()}/fd/{descriptor}"


@contextlib.contextmanager
def removing(folder: str) -> Iterator[None]:
    """Remove this folder in the end, if there is one: a command that must be killed cannot clean up behind itself."""
    try:
        yield
    finally:
        if folder:
            import shutil  # takes longer to load than all else here, and most commands have no such folder

            shutil.rmtree(folder, ignore_errors=True)


def start(header: dict[str, Any]) -> subprocess.Popen[bytes]:
    """Start the command in its own session, so that signals of a terminal or a group do not reach it."""
    environment = header["environment"]
    if INIT_PIPE in os.environ:
        environment = {**environment, INIT_PIPE: os.environ[INIT_PIPE]}
    if header["keep_environment"]:
        environment = {**os.environ, **environment}
    if header["secret"] and hasattr(os, "memfd_create"):
        environment = {**environment, "HVDKIT_SECRET_FILE": offer(header["secret"])}
    try:
        os.chdir(header["folder"])
    except OSError as error:
        print(f"hvdkitrun: starting in {os.getcwd()}, for there is no {header['folder']}: {error}", file=sys.stderr)
    return popen(
        header["command"],
        env=environment,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        pass_fds=header["pass_fds"],
    )


def popen(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a command, or say why it does not start, and exit with the shell's status for that."""
    try:
        return subprocess.Popen(command, **options)  # noqa: S603 (the caller's own command, as an argv list)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE):
            hint = "raise this host's limits of processes, memory and open files (ulimit -a shows them)"
        else:
            hint = "check that the program is installed on this host and on its PATH"
        print(f"hvdkitrun: cannot start {command[0]!r}: {error}\nHINT: {hint}", file=sys.stderr)
        sys.exit(127 if isinstance(error, FileNotFoundError) else 126)


def signal_group(child: subprocess.Popen[bytes], number: int) -> None:
    """Signal the command and everything it started; they may all have ended just now."""
    try:
        os.killpg(child.pid, number)
    except (ProcessLookupError, PermissionError):  # macOS says the latter of a group of zombies
        return


def adopt_orphans() -> None:
    """Become the parent of what the command leaves behind, so that it can be found. Linux only; elsewhere it stays."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def bury_orphans(child: subprocess.Popen[bytes]) -> None:
    """Take the status of adopted processes that have ended, but leave the command's own to Popen."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid != child.pid:
            os.waitpid(ended.si_pid, 0)


def send(pid: int, number: int) -> None:
    """Signal a process that may have ended just now."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def children_by_parent() -> dict[int, list[int]]:
    """The living children of each process, as /proc tells them; none where there is no /proc."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc") if os.path.isdir("/proc") else []:
        if name.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/{name}/stat", "rb") as file:
                # The program's name stands in parentheses and may itself hold spaces and parentheses.
                state, parent = file.read().rpartition(b")")[2].split()[:2]
                if state != b"Z":
                    children.setdefault(int(parent), []).append(int(name))
    return children


def own_children() -> list[int]:
    """The children of this process, with those that it has adopted."""
    return children_by_parent().get(os.getpid(), [])


def descendants() -> list[int]:
    """Every process below this one."""
    children = children_by_parent()
    found, unvisited = [], [os.getpid()]
    while unvisited:
        below = children.get(unvisited.pop(), [])
        found += below
        unvisited += below
    return found


def sweep() -> None:
    """Kill all descendants, also those that left the command's process group."""
    for pid in descendants():
        send(pid, signal.SIGKILL)


def init_pipe() -> int | None:
    """Put into the environment where a rank says that it calls hvd.init(); the descriptor from which that is read.

    None where there is no /proc. A redirection of the rank's output leaves this way open.
    """
    os.environ.pop(INIT_PIPE, None)
    if not os.path.isdir("/proc/self/fd"):
        return None
    reading, writing = os.pipe()
    os.environ[INIT_PIPE] = f"/proc/{os.getpid()}/fd/{writing}"
    return reading


class Leash:
    """One command, and its end: quickly, or gently with the time to save."""

    def __init__(
        self,
        child: subprocess.Popen[bytes],
        grace: float,
        stop_grace: float,
        init: int | None = None,
        relays: bool = False,
    ) -> None:
        """``grace``: seconds for a quick end; ``stop_grace``: for a gentle one; ``relays``: the command is mpirun.

        ``init``: of ``init_pipe``.
        """
        self._child = child
        self._init = init
        self._grace, self._stop_grace = grace, stop_grace
        self._relays = relays
        self._kill_at: float | None = None
        self._asked: set[int] = set()  # processes that have got SIGTERM each by itself
        self.is_stopped = False  # gently

    def wait(self, sources: list[int], wake: int, gently: int, quickly: Collection[int] = ()) -> int:
        """Wait for the command; when told to stop, or left alone, end it. Returns Popen's return code.

        ``gently`` and ``quickly``: the signals to this process that ask for such an end.
        """
        sources = sources if self._init is None else [*sources, self._init]
        while (code := self._child.poll()) is None or (self._asked and own_children()):
            ready, _, _ = select.select(sources, [], [], self._pause())
            if 0 in ready:
                if os.read(0, 65536):
                    self._end_gently()
                else:
                    sources.remove(0)
                    self._end_quickly()
            if self._init in ready:
                self._tell_init(sources)
            if wake in ready:
                numbers = os.read(wake, 512)
                bury_orphans(self._child)
                if gently in numbers:
                    self._end_gently()
                elif any(number in quickly for number in numbers):
                    self._end_quickly()
            self._go_on_ending()
        self._tell_init(sources)
        # Its own processes shall not outlive it, but after success those may that left its group on purpose.
        signal_group(self._child, signal.SIGKILL)
        if code != 0 or self.is_stopped or self._kill_at is not None:
            sweep()
        return code

    def _tell_init(self, sources: list[int]) -> None:
        if self._init in sources and select.select([self._init], [], [], 0)[0]:
            sources.remove(self._init)
            os.write(2, INIT)

    def _pause(self) -> float | None:
        pauses = [LOOK_SECONDS] if self.is_stopped else []
        if self._kill_at is not None:
            pauses.append(max(0.0, self._kill_at - time.monotonic()))
        return min(pauses, default=None)

    def _end_quickly(self) -> None:
        if self._asked:  # it has had its time
            self._kill_at = time.monotonic()
        elif self._kill_at is None:
            self._kill_at = time.monotonic() + self._grace
            signal_group(self._child, signal.SIGTERM)

    def _end_gently(self) -> None:
        if self._kill_at is None:
            self.is_stopped = True
            if not self._relays:  # else hvdkitrun learns from each rank when mpirun can end
                self._kill_at = time.monotonic() + self._stop_grace

    def _go_on_ending(self) -> None:
        if self._kill_at is not None and time.monotonic() >= self._kill_at:
            self._kill_at += LOOK_SECONDS  # what is not gone by then is killed again
            signal_group(self._child, signal.SIGKILL)
            if self.is_stopped:
                sweep()
        elif self.is_stopped and not self._relays:
            to_ask = {self._child.pid} if self._child.poll() is None else set(own_children())
            for pid in to_ask - self._asked:
                send(pid, signal.SIGTERM)
            self._asked |= to_ask
        elif self.is_stopped and self._kill_at is None:
            send(self._child.pid, RELAY)


def wake_on_signals(numbers: Iterable[int] = STOP_SIGNALS) -> int:
    """A descriptor that becomes readable, with the signal's number as a byte, on SIGCHLD and on these signals."""
    receiving, sending = os.pipe()
    os.set_blocking(sending, False)
    signal.set_wakeup_fd(sending, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, *numbers):
        signal.signal(number, lambda number, frame: None)
    return receiving


def end_like(code: int, by_signal: bool) -> None:
    """End as the command ended: by its signal where the parent can see one, else with 128 plus its number."""
    if code >= 0:
        sys.exit(code)
    if by_signal:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the command's own core is the one worth having
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(128 - code)


def main() -> None:
    """Read what to run, run it on the leash, end as it ended."""
    wake = wake_on_signals()
    adopt_orphans()
    header = read_header()
    if header is None:
        return  # hvdkitrun was gone before it could say what to run
    init = None if header["relays"] else init_pipe()
    with removing(header.get("scratch", "")):
        child = start(header)
        for descriptor in header["pass_fds"]:
            os.close(descriptor)
        leash = Leash(child, header["grace"], header["stop_grace"], init, header["relays"])
        code = leash.wait([0, wake], wake, signal.SIGTERM, (signal.SIGINT, signal.SIGHUP))
    end_like(code, header["by_signal"])


def run_under_mpirun(stop_grace: float, command: list[str]) -> None:
    """Run a rank's command in the process group that mpirun made for it, which mpirun signals as a whole."""
    mpirun = os.getppid()
    wake = wake_on_signals(
        [RELAY, *(signal.Signals[f"SIG{name}"] for name in FORWARDED if hasattr(signal, f"SIG{name}"))]
    )
    adopt_orphans()
    init = init_pipe()
    leash = Leash(popen(command), 0.0, stop_grace, init)
    code = leash.wait([wake], wake, RELAY)
    if leash.is_stopped or code == 0:
        os.write(2, ENDED)  # also of a rank that was through before: hvdkitrun waits for all when it is told to stop
    if leash.is_stopped:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        while os.getppid() == mpirun:  # which ends this process, unless it is killed itself
            time.sleep(LOOK_SECONDS)
    end_like(code, by_signal=True)


if __name__ == "__main__":
    if sys.argv[1:]:
        run_under_mpirun(float(sys.argv[1]), sys.argv[2:])
    else:
        main()
