"""Tickets: a process's place in one generation of an elastic job, as the launcher tells it, and how it asks for one."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from hvdkit.environments.base import World

LAUNCHER = "hvdkitrun"
SECRET_BYTES = 32


class Member(NamedTuple):
    """A rank of one generation.

    ``slot`` is the local rank of its process as long as that lives: the slots of a host may have holes. ``address``:
    the host and port where it listens for the other ranks. ``process``: the launcher's number of the process, which no
    other process of the job has.
    """

    host: str
    slot: int
    address: tuple[str, int]
    process: int


@dataclass(frozen=True)
class Ticket:
    """The place of a process in a generation, and the members of that generation in the order of ranks.

    ``secret`` is fresh, and known to the members alone. ``needs_sync``: True unless all members have the same state.
    ``lost_ranks`` returns the members of which the launcher has said since then that they are gone; the thread calls it
    that got the ticket, until all ranks have met.
    """

    job: str
    generation: int
    rank: int
    members: tuple[Member, ...]
    secret: bytes = field(repr=False)
    needs_sync: bool = True
    lost_ranks: Callable[[], Collection[int]] = field(default=tuple, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Raise ValueError for a ticket that no launcher writes."""
        if not 0 <= self.rank < len(self.members) or len(self.secret) < SECRET_BYTES:
            raise ValueError(f"rank {self.rank} of {len(self.members)}, a secret of {len(self.secret)} bytes")

    @property
    def world(self) -> World:
        """The same place as a World, which other launchers describe by environment variables."""
        own = self.members[self.rank]
        local_size = sum(member.host == own.host for member in self.members)
        return World(LAUNCHER, self.rank, len(self.members), own.slot, local_size, job=self.job, host=own.host)

    def to_json(self) -> str:
        """Return the ticket as a line of text."""
        members = [[member.host, member.slot, *member.address, member.process] for member in self.members]
        return json.dumps([self.job, self.generation, self.rank, members, self.secret.hex(), self.needs_sync])


def ticket_of(text: str) -> Ticket:
    """Return the ticket in a line of text."""
    job, generation, rank, members, secret, needs_sync = json.loads(text)
    parsed = tuple(Member(host, slot, (address, port), process) for host, slot, address, port, process in members)
    return Ticket(job, generation, rank, parsed, bytes.fromhex(secret), needs_sync)


class Report(NamedTuple):
    """The facts that a process tells the launcher when it asks for a ticket.

    ``steps``: the steps that its state has seen, None if it has no state of the job. ``failed``: the generation ended
    by an error, which called the process ``lost`` lost.
    """

    steps: int | None = None
    failed: bool = False
    lost: int | None = None


class Launcher(Protocol):
    """The launcher of an elastic job, as a process of the job sees it.

    ``addresses``: those of this host at which other hosts of the job reach it; a process listens at the first one.
    """

    addresses: list[str]

    def next_ticket(self, address: tuple[str, int], report: Report) -> Ticket:
        """Tell where this process listens, and wait for the ticket of the next generation."""
