"""Which ranks wait for each other in different operations, from what each says of its only thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hvdkit.engine.loop.messages import Waits
from hvdkit.engine.ops.hints import for_dead_lock
from hvdkit.engine.ops.requests import Key


@dataclass
class Blocked:
    """A rank's only thread has been waiting, as it told: for a named operation, or a plan's lane."""

    message: Waits
    key: Key | None
    tells: int = 0  # how often this rank has said so since another rank said so for the first time


@dataclass(frozen=True)
class DeadLock:
    """What fails, and why: named operations, and lanes with the ranks that wait in them."""

    text: str
    keys: list[Key]
    lanes: list[tuple[int, list[int]]]


class DeadLocks:
    """``missing`` says which ranks a named operation waits for."""

    def __init__(self, missing: Callable[[Key], list[int]]) -> None:
        self._missing = missing
        self._blocked: dict[int, Blocked] = {}

    def report(self, rank: int, message: Waits) -> DeadLock | None:
        """A rank tells that its only thread waits (or, with None, that it goes on): the dead-lock that this shows."""
        if message.at is None:
            self._blocked.pop(rank, None)
            return None
        key = Key(*message.at) if isinstance(message.at, list) else None
        earlier = self._blocked.get(rank)
        ours = self._blocked[rank] = Blocked(message, key)
        if earlier is not None and earlier.message.at == message.at:
            ours.tells = earlier.tells + 1
        else:
            # What the others said before may be over: a rank that was slow to tell so must not be taken for stuck.
            for theirs in self._blocked.values():
                theirs.tells = 0
        for other, theirs in self._blocked.items():
            if other != rank and self._wait_for_each_other(rank, ours, other, theirs):
                return self._broken(rank, ours, other, theirs)
        return None

    def _waits_for(self, blocked: Blocked) -> list[int]:
        return blocked.message.waits_for if blocked.key is None else self._missing(blocked.key)

    def _wait_for_each_other(self, rank: int, ours: Blocked, other: int, theirs: Blocked) -> bool:
        """In different operations that were meant to be the same, or one of them in a plan."""
        if ours.message.at == theirs.message.at or not (ours.tells and theirs.tells):
            return False
        if ours.key is not None and theirs.key is not None and ours.message.label != theirs.message.label:
            return False  # different names: a script may well submit the other one later, from elsewhere
        return other in self._waits_for(ours) and rank in self._waits_for(theirs)

    def _broken(self, rank: int, ours: Blocked, other: int, theirs: Blocked) -> DeadLock:
        (low, low_blocked), (high, high_blocked) = sorted([(rank, ours), (other, theirs)], key=lambda pair: pair[0])
        text = (
            f"Mismatched operations: rank {low} waits in {low_blocked.message.what}, rank {high} waits in "
            f"{high_blocked.message.what}; each waits for the other.\n"
            f"{for_dead_lock([low_blocked.message.what, high_blocked.message.what])}"
        )
        lanes = []
        for who, blocked in ((rank, ours), (other, theirs)):
            if isinstance(lane := blocked.message.at, int):
                stuck = [member for member, more in self._blocked.items() if more.message.at == lane]
                lanes.append((lane, stuck))
                for member in stuck:
                    self._blocked.pop(member)
            self._blocked.pop(who, None)
        return DeadLock(text, list({one.key for one in (ours, theirs) if one.key is not None}), lanes)
