"""The hosts of an elastic job: those that the user named, or a script prints, and those that joined by themselves."""

from __future__ import annotations

import math
from collections.abc import Mapping

from hvdkit.launch.elastic.discovery import Discovery
from hvdkit.launch.hosts import Host

POLL_SECONDS = 0.1  # between two looks whether a script that finds hosts has ended


class HostsFound:
    """The hosts with their slots. A job whose script gives no answer has none, so that it ends after the timeout."""

    def __init__(self, source: Mapping[str, int] | Discovery) -> None:
        self._script = source if isinstance(source, Discovery) else None
        self._listed = {} if isinstance(source, Discovery) else source
        self._joined: dict[str, int] = {}
        self._is_new = True

    def looks_at(self, now: float) -> float:
        """Return when to look for news again, infinity without a script."""
        if self._is_new:
            return now
        return math.inf if self._script is None else now + POLL_SECONDS

    def look(self, now: float) -> dict[str, int] | None:
        """Return the hosts and their slots, None if there is no news since the last call."""
        if self._script is not None and (answer := self._script.look(now)) is not None:
            self._listed, self._is_new = answer, True
        if not self._is_new:
            return None
        self._is_new = False
        return {**self._listed, **self._joined}

    def knows(self, name: str) -> bool:
        """True if there is a host of this name."""
        return name in self._listed or name in self._joined

    def has_joined(self, name: str) -> bool:
        """True if a host has joined by itself."""
        return name in self._joined

    def join(self, host: Host) -> None:
        """Add a host that has joined."""
        self._joined[host.name], self._is_new = host.slots, True

    def leave(self, name: str) -> None:
        """Remove a host if it had joined."""
        self._is_new |= self._joined.pop(name, None) is not None

    def close(self) -> None:
        """End the script."""
        if self._script is not None:
            self._script.close()
