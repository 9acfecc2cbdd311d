"""The leash: starts one command in a session of its own, and ends it when standard input closes.

``hvdkitrun`` runs this file between itself and every rank, here or by ssh. It holds the other end of standard input, so
when it stops the job, is killed, or the connection breaks, the rank and what the rank started end too. The first line
on standard input is a JSON object that says what to run (and keeps the environment out of what ``ps`` shows).

Only the standard library: the file runs by its path, without hvdkit being importable, and starts in milliseconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

PR_SET_CHILD_SUBREAPER = 36
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


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
    if header["keep_environment"]:
        environment = {**os.environ, **environment}
    if header["secret"] and hasattr(os, "memfd_create"):
        environment = {**environment, "HVDKIT_SECRET_FILE": offer(header["secret"])}
    try:
        os.chdir(header["folder"])
    except OSError as error:
        print(f"hvdkitrun: starting in {os.getcwd()}, for there is no {header['folder']}: {error}", file=sys.stderr)
    try:
        return subprocess.Popen(  # noqa: S603 (the caller's own command, as an argv list)
            header["command"],
            env=environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=header["pass_fds"],
        )
    except OSError as error:
        print(
            f"hvdkitrun: cannot start {header['command'][0]!r}: {error}\n"
            "HINT: check that the program is installed on this host and on its PATH",
            file=sys.stderr,
        )
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


def descendants() -> list[int]:
    """Every process below this one, as /proc tells it; none where there is no /proc."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc") if os.path.isdir("/proc") else []:
        if name.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/{name}/stat", "rb") as file:
                # The program's name stands in parentheses and may itself hold spaces and parentheses.
                parent = int(file.read().rpartition(b")")[2].split()[1])
                children.setdefault(parent, []).append(int(name))
    found, unvisited = [], [os.getpid()]
    while unvisited:
        below = children.get(unvisited.pop(), [])
        found += below
        unvisited += below
    return found


def sweep() -> None:
    """Kill all descendants, also those that left the command's process group."""
    for pid in descendants():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def wait(child: subprocess.Popen[bytes], wake: int, grace: float) -> int:
    """Wait for the command; when told to stop, or left alone, end it. Returns Popen's return code."""
    kill_at: float | None = None
    sources = [0, wake]
    while (code := child.poll()) is None:
        left = None if kill_at is None else kill_at - time.monotonic()
        if left is not None and left <= 0:
            signal_group(child, signal.SIGKILL)
            left = None
        ready, _, _ = select.select(sources, [], [], left)
        stop = False
        if 0 in ready and not os.read(0, 65536):
            sources.remove(0)
            stop = True
        if wake in ready:
            stop = any(number in STOP_SIGNALS for number in os.read(wake, 512)) or stop
            bury_orphans(child)
        if stop and kill_at is None:
            kill_at = time.monotonic() + grace
            signal_group(child, signal.SIGTERM)
    # Its own processes shall not outlive it, but after success those may that left its group on purpose.
    signal_group(child, signal.SIGKILL)
    if code != 0 or kill_at is not None:
        sweep()
    return code


def wake_on_signals() -> int:
    """A descriptor that becomes readable, with the signal's number as a byte, on SIGCHLD and on signals to stop."""
    receiving, sending = os.pipe()
    os.set_blocking(sending, False)
    signal.set_wakeup_fd(sending, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, *STOP_SIGNALS):
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
    with removing(header.get("scratch", "")):
        child = start(header)
        for descriptor in header["pass_fds"]:
            os.close(descriptor)
        code = wait(child, wake, header["grace"])
    end_like(code, header["by_signal"])


if __name__ == "__main__":
    main()
