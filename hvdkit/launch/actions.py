"""The actions by which the launcher of an elastic job carries out what ``membership`` decides, and a user's limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from hvdkit.launch.slots import ProcessSlot


@dataclass(frozen=True)
class Limits:
    """The numbers of ranks that a user asks for, and the times that the job may wait.

    ``start``: the ranks of the first generation. ``seconds``: the longest wait for enough ranks, and for a process
    that does not ask. ``resets``: the most generations after the first, None for any number. ``cooldown``: the shortest
    and the longest time in seconds for which a failure closes its whole host (Horovod's policy); None: a failure
    concerns its slot alone.
    """

    start: int
    least: int
    most: int
    seconds: float = 600.0
    resets: int | None = None
    cooldown: tuple[float, float] | None = None


class Start(NamedTuple):
    """Start a process in a slot."""

    worker: int
    slot: ProcessSlot


class Kill(NamedTuple):
    """Kill a process that did not ask in time; its end is an event as any other."""

    worker: int


class Interrupt(NamedTuple):
    """Tell the members of the present generation to ask at their next commit."""

    workers: tuple[int, ...]


class Form(NamedTuple):
    """Send tickets: ``workers`` are the members in the order of their ranks.

    ``newcomers``: the ranks that have no state. ``changed``: True if a member failed, or ranks have no state, so that
    state must be compared and sent.
    """

    generation: int
    workers: tuple[int, ...]
    newcomers: tuple[int, ...]
    changed: bool


class Dismiss(NamedTuple):
    """Tell a process to end with success: it is not needed any more."""

    worker: int


class EndJob(NamedTuple):
    """End the job; ``reason`` is empty for success."""

    reason: str


Action = Start | Kill | Interrupt | Form | Dismiss | EndJob
