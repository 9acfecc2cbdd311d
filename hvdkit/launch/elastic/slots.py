"""The slots of an elastic job's hosts: where a process may be started, and when again after failures."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

FAILURES, FAILURE_SECONDS = 3, 600.0  # so many failures in this time, or without a success between, close a slot
FIRST_PAUSE_SECONDS = 1.0  # before a process is started again after its first failure, twice as long after the next
HOST_PAUSE_SECONDS = 10.0  # the same for a host that was lost
_MOST_DOUBLINGS = 60  # of a cool-down, far above all that a user asks for


class ProcessSlot(NamedTuple):
    """A place for one process. ``number`` is its local rank."""

    host: str
    number: int


@dataclass
class _History:
    """The failures of a slot or of a host."""

    failures: list[float] = field(default_factory=list)  # their times, since the last success at most
    opens_at: float = 0.0

    def fail(self, now: float, pause: float) -> bool:
        """Note a failure. Return True if it closes the slot or the host."""
        self.failures.append(now)
        recent = len(self.failures)
        self.opens_at = math.inf if recent >= FAILURES else now + pause * 2 ** (recent - 1)
        return recent == FAILURES

    def succeed(self, now: float) -> None:
        """Forget failures that are long ago: the slot works again."""
        self.failures = [at for at in self.failures if now - at < FAILURE_SECONDS]


class Slots:
    """The slots of all hosts that were found.

    ``cooldown``: the shortest and the longest time in seconds for which a failure closes its whole host (Horovod's
    policy); None: a failure concerns its slot alone. Failures of one host within the shortest time are one. ``news``:
    sentences about slots that were closed.
    """

    def __init__(self, cooldown: tuple[float, float] | None) -> None:
        self._cooldown = cooldown
        self._found: dict[str, int] = {}  # the slots of each host, in the order in which hosts were found
        self._of_slots: defaultdict[ProcessSlot, _History] = defaultdict(_History)
        self._of_hosts: defaultdict[str, _History] = defaultdict(_History)
        self._cooling: dict[str, tuple[int, float]] = {}  # how often each host was closed, and until when
        self._leaving: set[str] = set()  # hosts that will be taken away
        self.news: list[str] = []

    def found(self, hosts: Mapping[str, int]) -> None:
        """Note the hosts that there are, with their numbers of slots. A host that comes back has no history."""
        remaining = [name for name in self._found if name in hosts]
        new = [name for name in hosts if name not in self._found]
        for name in new:
            self._of_hosts.pop(name, None)
            for slot in [slot for slot in self._of_slots if slot.host == name]:
                del self._of_slots[slot]
        self._found = {name: hosts[name] for name in (*remaining, *new)}
        self._leaving &= hosts.keys()

    def leave(self, host: str) -> None:
        """Note that a host will be taken away, so that nothing is started there."""
        self._leaving.add(host)

    def all_leave(self) -> bool:
        """True if all hosts will be taken away."""
        return bool(self._found) and self._found.keys() <= self._leaving

    def exists(self, slot: ProcessSlot) -> bool:
        """True if a slot's host was found with so many slots, and stays."""
        return slot.number < self._found.get(slot.host, 0) and slot.host not in self._leaving

    def index(self, host: str) -> int:
        """Return the place of a host in the order in which hosts were found; hosts that are gone come last."""
        return list(self._found).index(host) if host in self._found else len(self._found)

    def fail(self, slot: ProcessSlot, now: float) -> None:
        """Note that the process in a slot has failed."""
        if self._cooldown is None:
            if self._of_slots[slot].fail(now, FIRST_PAUSE_SECONDS):
                self._tell(f"slot {slot.number} of host {slot.host} is closed after {FAILURES} failures")
        else:
            self._cool(slot.host, now, *self._cooldown)

    def succeed(self, slot: ProcessSlot, now: float) -> None:
        """Note that the process in a slot became a member."""
        self._of_slots[slot].succeed(now)
        self._of_hosts[slot.host].succeed(now)

    def lose_host(self, host: str, now: float) -> None:
        """Note that a host was lost."""
        if self._cooldown is None:
            if self._of_hosts[host].fail(now, HOST_PAUSE_SECONDS):
                self._tell(f"host {host} is closed since it was lost {FAILURES} times")
        else:
            self._cool(host, now, *self._cooldown)

    def _cool(self, host: str, now: float, shortest: float, longest: float) -> None:
        """Close a host for a while, unless it is closed already by another failure of the same incident."""
        times, until = self._cooling.get(host, (0, 0.0))
        if now >= until:
            pause = min(shortest * 2.0 ** min(times, _MOST_DOUBLINGS), longest)
            self._cooling[host] = times + 1, now + pause
            self._tell(f"host {host} is closed{f' for {pause:g} s' * math.isfinite(pause)} after a failure", host)

    def _tell(self, fact: str, without: str = "") -> None:
        """Add a sentence to the news, with the number of slots that remain, not counting those of a host."""
        count = sum(self._opens_at(slot) < math.inf and slot.host != without for slot in self._all())
        self.news.append(f"{fact}, and {slots_in_words(count)} remain{'s' * (count < 2)}")

    def _opens_at(self, slot: ProcessSlot) -> float:
        cooling = self._cooling.get(slot.host, (0, 0.0))[1]
        return max(self._of_slots[slot].opens_at, self._of_hosts[slot.host].opens_at, cooling)

    def _all(self) -> list[ProcessSlot]:
        slots = [ProcessSlot(host, number) for host, count in self._found.items() for number in range(count)]
        return [slot for slot in slots if slot.host not in self._leaving]

    def open(self, now: float, taken: Collection[ProcessSlot]) -> list[ProcessSlot]:
        """Return the slots in which a process may be started now."""
        return [slot for slot in self._all() if slot not in taken and self._opens_at(slot) <= now]

    def next_opening(self, now: float) -> float:
        """Return when the next slot opens, infinity if none does."""
        return min((at for slot in self._all() if (at := self._opens_at(slot)) > now), default=math.inf)


def slots_in_words(count: int) -> str:
    """Return the words for a number of slots."""
    return f"{count or 'no'} slot{'s' * (count > 1)}"
