"""Processes that the kernel killed for lack of memory: the worker notices it on its host, and hvdkitrun reports it.

The kernel counts the processes that it has killed to free memory, for each cgroup and for the host. Workers load this
file by its path, so it imports the standard library alone.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
from collections.abc import Iterator

MEMORY = "memory"  # a note "memory KILLS PEAK LIMIT", the last two in bytes, of a process that was killed
KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)  # codes of subprocess, and of a shell
LARGE_PART = 0.8  # of the available memory: a killed process of this size probably ran out of it
OTHER_CAUSES = (
    "HINT: find the sender of SIGKILL: the kernel when the host ran out of memory (see dmesg), SLURM, Kubernetes or "
    "Docker at one of their limits, or kill -9"
)


class MemoryWatch:
    """A count of the processes that the kernel kills for lack of memory. ``root``: the folder with /proc and /sys."""

    def __init__(self, root: str = "/") -> None:
        self._root = root
        self._groups = list(self._find_groups())
        self._kills = self._count_kills()

    def note(self) -> str:
        """Return the note about a killed child: the kernel's kills since construction, the child's peak, the limit."""
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
        return f"{MEMORY} {self._count_kills() - self._kills} {peak} {self._limit()}"

    def _find_groups(self) -> Iterator[str]:
        """Yield the folders of this process's memory cgroup, of version 1 or 2, and of the cgroups around it."""
        for line in self._lines("proc/self/cgroup"):
            _, controllers, path = line.split(":", 2)
            if controllers == "" or "memory" in controllers.split(","):
                base = os.path.join("sys/fs/cgroup", "memory" if controllers else "")
                group = os.path.join(base, path.strip("/"))
                while len(group) > len(base):
                    yield group
                    group = os.path.dirname(group)
                yield base  # where a container has its own cgroup

    def _count_kills(self) -> int:
        """Return how many processes of the cgroup, or else of the host, were killed so far."""
        names = [
            os.path.join(group, name) for group in self._groups for name in ("memory.events", "memory.oom_control")
        ]
        for path in (*names, "proc/vmstat"):
            for line in self._lines(path):
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
        return 0

    def _limit(self) -> int:
        """Return the bytes of memory that the process may use with the others of its cgroup."""
        limits = [1024 * int(line.split()[1]) for line in self._lines("proc/meminfo") if line.startswith("MemTotal:")]
        for group in self._groups:
            for name in ("memory.max", "memory.limit_in_bytes"):
                limits += [int(line) for line in self._lines(os.path.join(group, name)) if line.isdigit()]
        return min(limits, default=0)

    def _lines(self, path: str) -> list[str]:
        """Return the lines of a file, none if it cannot be read."""
        with contextlib.suppress(OSError), open(os.path.join(self._root, path), encoding="ascii") as file:
            return file.read().splitlines()
        return []


def explain(note: str) -> str:
    """Return ", probably out of memory (peak 3.9 of 4 GiB)", or "" for other causes, by the words behind MEMORY."""
    kills, peak, limit = map(int, note.split())
    if not kills and peak < LARGE_PART * limit:
        return ""
    unit, name = (1 << 30, "GiB") if limit >= 1 << 30 else (1 << 20, "MiB")
    return f", probably out of memory (peak {peak / unit:.3g} of {limit / unit:.3g} {name})"
