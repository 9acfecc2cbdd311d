"""What is asked of an operation that ranks negotiate: one row for each kind, in a module of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hvdkit.collectives.group import Array, Steps
from hvdkit.engine.ops.batch import Batch, Submission
from hvdkit.engine.ops.requests import Key, Request, Signature, mismatch
from hvdkit.engine.ranks.groups import Groups
from hvdkit.transports.base import DeviceCollectives

Requests = dict[int, Request]  # by rank
Ways = list[Steps[list[Any]]]  # one, or several side by side; the last to end has a result for each submission


class Assigned(Protocol):
    """What the coordinator assigns: process sets by their number, and numbers of lanes."""

    members: dict[int, list[int]]

    def next_lane(self, process_set: int) -> tuple[int, int | None]:
        """Return an id that no lane has had, and a number that no lane has that is open, None if all are taken."""

    def next_region(self, what: object, signature: Signature) -> int | None:
        """The number of a region for an operation that comes for the second time; None at all other times."""

    def add_process_set(self, ranks: Sequence[int]) -> int | None:
        """The number of a new set of these ranks; None where there is one."""


def agreed(batch: Batch) -> Ways:
    """All have asked, which was all to wait for; the result is what the coordinator said."""

    def steps() -> Steps[list[Any]]:
        return [batch.extras[0]]
        yield []

    return [steps()]


@dataclass(frozen=True)
class Kind:
    """A kind of operation."""

    name: str
    # Whether it carries tensors: their names are in flight once, whatever of these kinds they are used for.
    carries_tensors: bool = True
    # Whether its signature is likely to come again, so that ranks tell it once and then its number.
    comes_again: bool = True
    # Whether ready ones of the same type, operation and factors may be fused.
    fuses: bool = False
    # Whether the process set that its signature names ("id") is gone with it.
    ends_process_set: bool = False
    # What one rank alone asks wrongly, in a process set of ``size``, in words; None where that cannot be.
    wrong: Callable[[Key, int, Request, int], str | None] | None = None
    # What differs between all ranks' requests that must not, in words.
    mismatch: Callable[[Key, Requests], str | None] = mismatch
    # What members need to know of each other, or what the coordinator assigns; None: only that all have asked.
    decide: Callable[[Assigned, Key, Requests], Any] | None = None
    # What each rank does about that when it starts the operation.
    begun: Callable[[Groups, Submission, Any], None] | None = None
    # What a rank that has joined contributes; None where it cannot take part.
    joined: Callable[[Signature], list[Array]] | None = None
    run: Callable[[Batch], Ways] = agreed
    # The same by the collectives of the device where the tensors are. It launches everything before it first yields.
    run_on_device: Callable[[DeviceCollectives, Batch], Steps[list[Any]]] | None = None
    # Which way the tensors go and why, for people.
    why: Callable[[Batch], str] | None = None
    # What follows from its end, if anything does.
    ended: Callable[[Groups, Signature, Any], None] | None = None
