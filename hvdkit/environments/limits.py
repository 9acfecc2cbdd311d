"""The system's limits that stop a job (files, processes, memory, disks), each as a sentence with a hint."""

from __future__ import annotations

import errno
import os
import resource

FILES_OF_A_RANK = 32  # that it has open at once, as measured


def exhausted(error: BaseException) -> str | None:
    """Return the limit that caused an exception, and what to do; None for any other exception.

    C++ libraries raise RuntimeError with the system's words in it.
    """

    def is_due_to(*numbers: int) -> bool:
        if isinstance(error, OSError):
            return error.errno in numbers
        return isinstance(error, RuntimeError) and any(os.strerror(number) in str(error) for number in numbers)

    if is_due_to(errno.EMFILE, errno.ENFILE):
        return files()
    if is_due_to(errno.EAGAIN) or str(error) == "can't start new thread":
        return processes()
    if is_due_to(errno.ENOMEM) or isinstance(error, MemoryError):
        return memory()
    if is_due_to(errno.ENOSPC, errno.EDQUOT):
        return room(str(getattr(error, "filename", None) or ""))
    if isinstance(error, FileNotFoundError) and "No usable temporary directory" in str(error):
        return f"no folder for temporary files is writable\nHINT: name one with TMPDIR ({error.strerror})"
    return None


def too_few_files(needed: int) -> str | None:
    """Return a sentence if the limit of open files is lower than needed, else None."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return files(needed) if limit != resource.RLIM_INFINITY and limit < needed else None


def files(needed: int = 0) -> str:
    """Say that too few files may be open. ``needed``: the number of files, 0 if it is unknown."""
    more = f", and {needed} are needed" if needed else ""
    fact = f"too few files may be open: the limit of a process is {_shown(resource.RLIMIT_NOFILE)} (ulimit -n){more}"
    return f"{fact}\nHINT: raise it: ulimit -n {max(1024, 2 * needed)}"


def processes() -> str:
    """Say that no process or thread can be started."""
    limit = f"{_shown(resource.RLIMIT_NPROC)} (ulimit -u)"
    hint = "raise it: ulimit -u 4096; in a container raise its limit of processes; or end processes"
    return f"the system starts no more processes or threads for this user: the limit is {limit}\nHINT: {hint}"


def memory() -> str:
    """Say that there is no memory."""
    limit = f"{_shown(resource.RLIMIT_AS, 1024, ' KiB')} (ulimit -v)"
    hint = "raise it: ulimit -v unlimited; or start fewer ranks on this host"
    return f"the system gives no more memory: the limit of a process is {limit}\nHINT: {hint}"


def room(path: str = "") -> str:
    """Say that a disk is full."""
    hint = "make room there, or name another folder with TMPDIR"
    return f"there is no room left for {path or 'temporary files'}\nHINT: {hint}"


def _shown(limit: int, unit: int = 1, words: str = "") -> str:
    soft, _ = resource.getrlimit(limit)
    return "none" if soft == resource.RLIM_INFINITY else f"{soft // unit}{words}"
