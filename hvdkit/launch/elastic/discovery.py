"""The hosts of an elastic job and their slots, which a script of the user prints from time to time.

As ``horovod.runner.elastic.discovery`` it has the names of Horovod's module that other programs use.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import IO

from hvdkit.launch import UsageError
from hvdkit.launch.hosts import parse_discovered

LOOK_SECONDS = 1.0  # between two runs of the script
RUN_SECONDS = 30.0  # that a run may take


class HostDiscovery(ABC):
    """A source of the hosts that are available now."""

    @abstractmethod
    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Return the hosts with the number of slots of each."""


class FixedHosts(HostDiscovery):
    """Hosts that a program sets."""

    def __init__(self, available_hosts: Mapping[str, int]) -> None:
        self.set(available_hosts)

    def set(self, available_hosts: Mapping[str, int]) -> None:
        """Replace the hosts."""
        self._available_hosts = dict(available_hosts)

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        return dict(self._available_hosts)


class HostDiscoveryScript(HostDiscovery):
    """A script that prints hosts. ``slots``: the slots of a host for which it prints no number."""

    def __init__(self, discovery_script: str, slots: int) -> None:
        self._script, self._slots = discovery_script, slots

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Run the script. Raises subprocess.SubprocessError if it fails or hangs, UsageError for what it prints."""
        done = subprocess.run(  # noqa: S602 (a command of the user)
            self._script, shell=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, timeout=RUN_SECONDS, check=True
        )
        return _hosts_in(done.stdout, self._slots)


def _hosts_in(output: bytes, slots: int) -> dict[str, int]:
    """Return the hosts that a script has printed. Raises UsageError."""
    return {host.name: host.slots for host in parse_discovered(output.decode(errors="replace"), slots)}


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
            printed = output.read()
        if process.returncode:
            self._fail(f"ended with code {process.returncode}")
            return None
        try:
            hosts = _hosts_in(printed, self._slots)
        except UsageError as error:
            self._fail(str(error).partition("\n")[0])
            return None
        if self._is_failing:
            self._say(f"the discovery script {self._script} works again")
        self._is_failing = False
        return hosts

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
            self._say(f"the discovery script {self._script}: {fact}; its last answer stays valid")
        self._is_failing = True

    def close(self) -> None:
        """Kill the present run, if there is one."""
        if self._run is not None:
            process, output, _ = self._run
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            output.close()
            self._run = None
