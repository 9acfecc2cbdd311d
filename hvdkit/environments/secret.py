"""The secret of a job: a file that only its user can read, from ``hvdkitrun`` or named in HVDKIT_SECRET_FILE."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping

from hvdkit import config
from hvdkit.errors import EnvironmentConflictError

_EVERYWHERE = (
    "the same file must be on every host, and in every container; one that you name when you start hvdkitrun takes the "
    "place of the one that it makes"
)
SHORTEST_BYTES, LONGEST_BYTES = 16, 4096


def job_secret(environ: Mapping[str, str] | None = None) -> bytes | None:
    """What is in the file, None where none is named.

    Raises EnvironmentConflictError where it cannot be read, others can read it, or it holds too little.
    """
    path = config.value_of("secret_file", os.environ if environ is None else environ)
    if not path:
        return None
    try:
        # Not blocking: a pipe that nobody writes to is refused below, not waited for.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise _refused(path, f"cannot be read: {error.strerror}", _EVERYWHERE) from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise _refused(path, "is no file", "name a file")
        if status.st_mode & 0o077 or status.st_uid not in (os.geteuid(), 0):
            raise _refused(path, "can be read or changed by others", "it must be yours: chown, and chmod 600")
        secret = os.read(descriptor, LONGEST_BYTES + 1).strip()
    finally:
        os.close(descriptor)
    if not SHORTEST_BYTES <= len(secret) <= LONGEST_BYTES:
        raise _refused(
            path,
            f"has not from {SHORTEST_BYTES} to {LONGEST_BYTES} bytes",
            "make one: (umask 077; openssl rand -hex 32 > secret)",
        )
    return secret


def _refused(path: str, fact: str, hint: str) -> EnvironmentConflictError:
    return EnvironmentConflictError(f"the job's secret HVDKIT_SECRET_FILE={path} {fact}\nHINT: {hint}")
