"""Tickets: a process's place in one generation of an elastic job, as the launcher tells it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from hvdkit.environments.base import World

LAUNCHER = "hvdkitrun"


class Member(NamedTuple):
    """A rank of one generation.

    ``slot`` is the local rank of its process as long as that lives: the slots of a host may have holes. ``address``:
    the host and port where it listens for the other ranks.
    """

    host: str
    slot: int
    address: tuple[str, int]


@dataclass(frozen=True)
class Ticket:
    """The place of a process in a generation, and the members of that generation in the order of ranks.

    ``secret`` is fresh, and known to the members alone.
    """

    job: str
    generation: int
    rank: int
    members: tuple[Member, ...]
    secret: bytes = field(repr=False)

    @property
    def world(self) -> World:
        """The place in the form in which launchers tell it by environment variables."""
        own = self.members[self.rank]
        local_size = sum(member.host == own.host for member in self.members)
        return World(LAUNCHER, self.rank, len(self.members), own.slot, local_size, job=self.job, host=own.host)

    def to_json(self) -> str:
        """Return the ticket as a line of text."""
        members = [[member.host, member.slot, *member.address] for member in self.members]
        return json.dumps([self.job, self.generation, self.rank, members, self.secret.hex()])


def ticket_of(text: str) -> Ticket:
    """Return the ticket in a line of text."""
    job, generation, rank, members, secret = json.loads(text)
    parsed = tuple(Member(host, slot, (address, port)) for host, slot, address, port in members)
    return Ticket(job, generation, rank, parsed, bytes.fromhex(secret))


class Launcher(Protocol):
    """The launcher of an elastic job, as a process of the job sees it."""

    def next_ticket(self, address: tuple[str, int]) -> Ticket:
        """Tell where this process listens, and wait for the ticket of the next generation."""
