"""The hosts of an elastic job and their slots, which a script of the user prints from time to time."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from typing import IO

from hvdkit.launch import UsageError
from hvdkit.launch.hosts import parse_discovered

LOOK_SECONDS = 1.0  # between two runs of the script
RUN_SECONDS = 30.0  # that a run may take


class Discovery:
    """The runs of a script that prints hosts, one at a time. An answer holds until another run gives one.

    ``say`` gets a line when runs begin to fail, and when they succeed again.
    """

    def __init__(self, script: str, slots: int, say: Callable[[str], None]) -> None:
        self._script, self._slots, self._say = script, slots, say
        self._run: tuple[subprocess.Popen[bytes], IO[bytes], float] | None = None
        self._next_at = 0.0
        self._is_failing = False

    def look(self, now: float) -> Mapping[str, int] | None:
        """Start a run, or take the answer of one that has ended; None if there is no new answer."""
        if self._run is None:
            if now >= self._next_at:
                self._start(now)
            return None
        process, output, began = self._run
        if process.poll() is None:
            if now - began > RUN_SECONDS:
                self.close()
                self._fail(f"did not end within {RUN_SECONDS:g} s")
            return None
        self._run = None
        with output:
            output.seek(0)
            text = output.read().decode(errors="replace")
        if process.returncode:
            self._fail(f"ended with code {process.returncode}")
            return None
        try:
            hosts = parse_discovered(text, self._slots)
        except UsageError as error:
            self._fail(str(error).partition("\n")[0])
            return None
        if self._is_failing:
            self._say(f"the discovery script {self._script} works again")
        self._is_failing = False
        return {host.name: host.slots for host in hosts}

    def _start(self, now: float) -> None:
        self._next_at = now + LOOK_SECONDS
        output = tempfile.TemporaryFile()  # noqa: SIM115 (closed when the run has ended)
        try:
            process = subprocess.Popen(  # noqa: S602 (a command of the user)
                self._script, shell=True, stdin=subprocess.DEVNULL, stdout=output, start_new_session=True
            )
        except OSError as error:
            output.close()
            self._fail(str(error))
        else:
            self._run = process, output, now

    def _fail(self, fact: str) -> None:
        if not self._is_failing:
            self._say(f"the discovery script {self._script} {fact}; its last answer holds")
        self._is_failing = True

    def close(self) -> None:
        """Kill the present run, if there is one."""
        if self._run is not None:
            process, output, _ = self._run
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            output.close()
            self._run = None
