"""The slots of an elastic job's hosts: where a process may be started, and when again after failures."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

FAILURES, FAILURE_SECONDS = 3, 600.0  # so many failures of a slot in this time close it
FIRST_PAUSE_SECONDS = 1.0  # before a process is started again after its first failure, twice as long after the next


class ProcessSlot(NamedTuple):
    """A place for one process. ``number`` is its local rank."""

    host: str
    number: int


@dataclass
class _History:
    failures: list[float] = field(default_factory=list)  # their times
    not_before: float = 0.0  # when a process may be started again


class Slots:
    """The slots of all hosts that were found.

    ``cooldown``: the shortest and the longest time in seconds for which a failure closes its whole host (Horovod's
    policy); None: a failure concerns its slot alone.
    """

    def __init__(self, cooldown: tuple[float, float] | None) -> None:
        self._cooldown = cooldown
        self._hosts: dict[str, int] = {}  # the slots of each host, in the order in which hosts were found
        self._closed: dict[str, float] = {}  # until when
        self._failures_of_hosts: Counter[str] = Counter()
        self._histories: defaultdict[ProcessSlot, _History] = defaultdict(_History)

    def found(self, hosts: Mapping[str, int]) -> None:
        """Note the hosts that there are, with their numbers of slots."""
        remaining = [name for name in self._hosts if name in hosts]
        self._hosts = {name: hosts[name] for name in (*remaining, *(name for name in hosts if name not in remaining))}

    def close(self, host: str) -> None:
        """Start nothing on a host any more."""
        self._closed[host] = math.inf

    def exists(self, slot: ProcessSlot) -> bool:
        """True if a slot's host was found with so many slots, and not closed for good."""
        return slot.number < self._hosts.get(slot.host, 0) and self._closed.get(slot.host, 0.0) < math.inf

    def index(self, host: str) -> int:
        """Return the place of a host in the order in which hosts were found; hosts that are gone come last."""
        return list(self._hosts).index(host) if host in self._hosts else len(self._hosts)

    def failed(self, slot: ProcessSlot, now: float) -> None:
        """Note that the process in a slot has failed."""
        history = self._histories[slot]
        history.failures = [*(at for at in history.failures if now - at < FAILURE_SECONDS), now]
        count = len(history.failures)
        history.not_before = math.inf if count >= FAILURES else now + FIRST_PAUSE_SECONDS * 2 ** (count - 1)
        if self._cooldown is not None:
            shortest, longest = self._cooldown
            self._failures_of_hosts[slot.host] += 1
            until = now + min(shortest * 2 ** (self._failures_of_hosts[slot.host] - 1), longest)
            self._closed[slot.host] = max(until, self._closed.get(slot.host, 0.0))

    def open(self, now: float, taken: Collection[ProcessSlot]) -> list[ProcessSlot]:
        """Return the slots in which a process may be started now."""
        slots = [ProcessSlot(host, number) for host, count in self._hosts.items() for number in range(count)]
        return [
            slot
            for slot in slots
            if slot not in taken and max(self._closed.get(slot.host, 0.0), self._histories[slot].not_before) <= now
        ]

    def opens_at(self, now: float) -> float:
        """Return when the next slot opens again, infinity if none does."""
        times = [*self._closed.values(), *(history.not_before for history in self._histories.values())]
        return min((time for time in times if time > now), default=math.inf)
