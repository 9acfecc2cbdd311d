"""The system's limits that stop a job (files, processes, memory, disks), each as a sentence with a hint."""

from __future__ import annotations

import errno
import os
import resource

FILES_OF_A_RANK = 32  # that it has open at once, as measured
_MANY = 1024  # files that are enough for most jobs
_NO_THREAD, _NO_FOLDER = "can't start new thread", "No usable temporary directory"  # Python's words
_FILES, _PROCESSES, _ROOM = (errno.EMFILE, errno.ENFILE), (errno.EAGAIN,), (errno.ENOSPC, errno.EDQUOT)


def exhausted(error: BaseException) -> str | None:
    """Return the limit that caused an exception, and what to do; None for any other exception.

    C++ libraries raise RuntimeError with the system's words in it.
    """

    def is_due_to(numbers: tuple[int, ...]) -> bool:
        if isinstance(error, OSError):
            return error.errno in numbers
        return isinstance(error, RuntimeError) and any(os.strerror(number) in str(error) for number in numbers)

    if is_due_to(_FILES):
        return files()
    if is_due_to(_PROCESSES) or str(error) == _NO_THREAD:
        return processes()
    if is_due_to((errno.ENOMEM,)) or isinstance(error, MemoryError):
        return memory()
    if is_due_to(_ROOM):
        return room(str(getattr(error, "filename", None) or ""))
    if isinstance(error, FileNotFoundError) and _NO_FOLDER in str(error):
        return f"no folder for temporary files can be written\nHINT: name one with TMPDIR ({error.strerror})"
    return None


def too_few_files(needed: int) -> str | None:
    """Return a sentence if the limit of open files is lower than needed, else None."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return files(needed) if limit != resource.RLIM_INFINITY and limit < needed else None


def files(needed: int = 0) -> str:
    """Say that too few files may be open. ``needed``: the number of files, 0 if it is unknown."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    more = f", and {needed} are needed" if needed else ""
    return (
        f"too few files may be open: the limit of a process is {limit} (ulimit -n){more}\n"
        f"HINT: raise it: ulimit -n {max(_MANY, 2 * needed)}"
    )


def processes() -> str:
    """Say that no process or thread can be started."""
    return (
        f"the system starts no more processes or threads for this user: the limit is {_shown(resource.RLIMIT_NPROC)} "
        "(ulimit -u)\n"
        "HINT: raise it: ulimit -u 4096; in a container raise its limit of processes; or end processes"
    )


def memory() -> str:
    """Say that there is no memory."""
    return (
        f"the system gives no more memory: the limit of a process is {_shown(resource.RLIMIT_AS, 1024, ' KiB')} "
        "(ulimit -v)\n"
        "HINT: raise it: ulimit -v unlimited; or start fewer ranks on this host"
    )


def room(path: str = "") -> str:
    """Say that a disk is full."""
    where = path or "temporary files"
    return f"there is no room left for {where}\nHINT: make room there, or name another folder with TMPDIR"


def _shown(limit: int, unit: int = 1, words: str = "") -> str:
    soft, _ = resource.getrlimit(limit)
    return "none" if soft == resource.RLIM_INFINITY else f"{soft // unit}{words}"
