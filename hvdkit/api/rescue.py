"""The rescue of a state: a job that must end writes it into a folder, from which the next start goes on.

A process that gets SIGTERM has some seconds left: it finishes its step, and writes at its next commit.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import pickle
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hvdkit import config
from hvdkit.api.interrupts import leave_job
from hvdkit.api.states import State, Version
from hvdkit.api.transfer import StatePickler

logger = logging.getLogger("hvdkit")


class Rescue:
    """The folder of rescued states, which processes of several hosts may use at once.

    ``number``: of the call of ``run`` in the program, whose states no other call reads.
    """

    def __init__(self, folder: Path, number: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._number, self._process = folder, number, os.getpid()
        self._is_waiting = False  # for other ranks, so that SIGTERM need not wait for a commit
        self.is_due = False

    def __enter__(self) -> Rescue:
        """Take SIGTERM, unless the program does so itself."""
        is_main = threading.current_thread() is threading.main_thread()
        self._has_signal = is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        if self._has_signal:
            signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        if self._has_signal:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _note(self, *_: Any) -> None:
        if os.getpid() != self._process:  # as of a data loader
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        self.is_due = True
        if self._is_waiting:
            raise leave_job()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Have SIGTERM raise LeaveJob in this context, in which the state does not change."""
        self._is_waiting = True
        try:
            if self.is_due:
                raise leave_job()
            yield
        finally:
            self._is_waiting = False

    def write(self, state: State) -> None:
        """Write a state as it was saved, unless the folder has the same or a newer one; older ones are removed."""
        if not state._can_send():
            logger.warning("The state is not rescued, since %s has a sync() of its own.", type(state).__name__)
            return
        if state._version == Version():
            return  # nothing is lost
        path = self._folder / "state-{}-{:012d}-{:06d}.hvdkit".format(self._number, *state._version)
        with open(self._folder / ".lock", "w") as lock:
            with suppress(OSError):  # a file system without locks: several processes may write, each a file of its own
                fcntl.flock(lock, fcntl.LOCK_EX)  # which ends with this process
            earlier = self._paths()
            if earlier and earlier[-1].name >= path.name:
                return
            part = path.with_suffix(f".{socket.gethostname()}.{os.getpid()}")
            with open(part, "wb") as file:
                file.write(json.dumps(state._version).encode() + b"\n")
                StatePickler(file, protocol=5).dump(state._content())
                file.flush()
                os.fsync(file.fileno())
            part.rename(path)
            for other in earlier:
                other.unlink(missing_ok=True)
        logger.warning("The state is rescued in %s: the next start goes on from there.", path)

    def read(self, state: State) -> bool:
        """Replace a state by the newest one in the folder. Return False if there is none."""
        paths = self._paths() if state._can_send() else []
        if not paths:
            return False
        with open(paths[-1], "rb") as file:
            version = Version(*json.loads(file.readline()))
            state._take(pickle.load(file))  # noqa: S301 (the user's own file)
        state._version = version
        logger.warning("This process goes on from the state that was rescued in %s.", paths[-1])
        return True

    def clear(self) -> None:
        """Remove the states, since the training has come to its end."""
        for path in self._paths():
            path.unlink(missing_ok=True)

    def _paths(self) -> list[Path]:
        return sorted(self._folder.glob(f"state-{self._number}-*.hvdkit"))


def from_settings(number: int) -> Rescue | None:
    """Return the rescue that HVDKIT_RESCUE asks for, for a call of ``run``; None if it is not set."""
    folder = config.from_environment().rescue
    return Rescue(Path(folder), number) if folder else None
