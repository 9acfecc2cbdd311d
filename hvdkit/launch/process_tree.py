"""The descendants of a process, also those that left the group of their parent.

Workers load this file by its path, so it imports the standard library alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess

PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Become the parent of processes that the command leaves behind, so that they are found."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def bury_orphans(child: subprocess.Popen[bytes]) -> None:
    """Take the status of adopted processes that have ended; Popen takes the command's own."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid != child.pid:
            os.waitpid(ended.si_pid, 0)


def send(pid: int, number: int, to_group: bool = False) -> None:
    """Send a signal to a process, or to the group that it leads. Does nothing if it has ended."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # the latter of a process of another user
        (os.killpg if to_group else os.kill)(pid, number)


def children_by_parent() -> dict[int, list[int]]:
    """Return the living children of each process."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/{name}/stat", "rb") as file:
                # The program's name stands in parentheses and may itself hold spaces and parentheses.
                state, parent = file.read().rpartition(b")")[2].split()[:2]
                if state != b"Z":
                    children.setdefault(int(parent), []).append(int(name))
    return children


def own_children() -> list[int]:
    """Return the children of this process, including adopted processes."""
    return children_by_parent().get(os.getpid(), [])


def sweep() -> None:
    """Kill all descendants, also those that left the command's process group."""
    children = children_by_parent()
    left = children.get(os.getpid(), [])
    while left:
        pid = left.pop()
        left += children.get(pid, [])
        send(pid, signal.SIGKILL)
