"""The actions by which the driver of an elastic job carries out what ``membership`` decides, and a user's limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from hvdkit.launch.elastic.slots import ProcessSlot


@dataclass(frozen=True)
class Limits:
    """The numbers of ranks that a user asks for, and the times that the job may wait.

    ``start``: the ranks of the first generation. ``seconds``: the longest wait for enough ranks, and for a process
    that does not ask. ``resets``: the most generations after the first, None for any number. ``cooldown``: the shortest
    and the longest time in seconds for which a failure closes its whole host (Horovod's policy); None: a failure
    concerns its slot alone. ``hosts_may_change``: other hosts may be found later. ``rescues``: the state outlives the
    job, which therefore ends when all hosts leave.
    """

    start: int
    least: int
    most: int
    seconds: float = 600.0
    resets: int | None = None
    cooldown: tuple[float, float] | None = None
    hosts_may_change: bool = False
    rescues: bool = False


class Start(NamedTuple):
    """Start a process in a slot."""

    worker: int
    slot: ProcessSlot


class Kill(NamedTuple):
    """Kill a process, for a reason; its end is an event as any other."""

    worker: int
    reason: str


class Interrupt(NamedTuple):
    """Tell members of the present generation to ask at their next commit.

    ``gone``: members that have failed since the last interrupt, for which those that still connect need not wait.
    """

    workers: tuple[int, ...]
    gone: tuple[int, ...] = ()


class Form(NamedTuple):
    """Send tickets: ``workers`` are the members in the order of their ranks; rank 0 has the newest state.

    ``needs_sync``: True unless all members have the same state.
    """

    generation: int
    workers: tuple[int, ...]
    needs_sync: bool


class Dismiss(NamedTuple):
    """Tell a process that has asked to end with success: the job does not need it any more."""

    worker: int


class EndJob(NamedTuple):
    """End the job and all its processes; ``reason`` is empty for success."""

    reason: str


class Announce(NamedTuple):
    """Tell the user that slots were closed, and why."""

    text: str


Action = Start | Kill | Interrupt | Form | Dismiss | EndJob | Announce
