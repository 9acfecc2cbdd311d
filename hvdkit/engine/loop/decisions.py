"""Parts of the coordinator's decisions: its records of pending operations, batches of ready ones, and dead-locks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

from hvdkit.engine.loop.messages import Waits
from hvdkit.engine.ops import KINDS
from hvdkit.engine.ops.hints import for_dead_lock
from hvdkit.engine.ops.requests import Key, Request, Signature

WIDEST_ELEMENT = 8  # bytes, as which every element counts: an estimate is enough to bound a batch


@dataclass(slots=True)
class PendingOperation:
    """An operation that not all of its ranks have asked for yet."""

    since: float
    requests: dict[int, Request] = field(default_factory=dict)
    warned: bool = False

    @property
    def signature(self) -> Signature:
        """The signature of the first request."""
        return next(iter(self.requests.values())).signature


@dataclass
class Rejection:
    """An error of the operations under ``keys``. Each of the members ``unnotified`` gets it when it asks for one."""

    text: str
    cause: str  # MISMATCH, LEFT or STALLED
    keys: list[Key]
    unnotified: set[int]
    left: int | None = None  # the rank that left the job


class Stall(NamedTuple):
    """An operation that some ranks wait for and others have not submitted."""

    key: Key
    submitted: list[int]
    missing: list[int]
    seconds: float


def batch_size(ready: Iterable[tuple[int, Signature]], threshold: int) -> int:
    """Return how many of the first operations, as (process set, signature), run as one batch: at least the first.

    They are of a kind that fuses and alike but for shapes, with at most ``threshold`` bytes.
    """
    rest = iter(ready)
    process_set, first = next(rest)
    nbytes, count = _fusible_bytes(first), 1
    if nbytes is None:
        return 1
    for other_set, signature in rest:
        more = _fusible_bytes(signature)
        if more is None or other_set != process_set or nbytes + more > threshold:
            break
        if _fusion_class(first) != _fusion_class(signature):
            break
        nbytes, count = nbytes + more, count + 1
    return count


def _fusible_bytes(signature: Signature) -> int | None:
    """Return the bytes of an operation that may share a batch, else None."""
    # The values that a codec gives depend on what is encoded together, which must not depend on what else was ready.
    if not KINDS[signature["kind"]].fuses or "codec" in signature or len(set(signature["dtype"])) != 1:
        return None
    return WIDEST_ELEMENT * sum(int(prod(shape)) for shape in signature["shape"])


def _fusion_class(signature: Signature) -> tuple[Any, ...]:
    fields = ("kind", "op", "prescale", "postscale", "device", "direct")
    return (signature["dtype"][0], *(signature.get(name) for name in fields))


class DeadLock(NamedTuple):
    """The named operations, and the lanes with the ranks that wait in them, that a dead-lock ends."""

    text: str
    keys: list[Key]
    lanes: list[tuple[int, list[int]]]


class DeadLocks:
    """Finds ranks that wait in different operations; ``missing`` returns the ranks that a named operation awaits."""

    def __init__(self, missing: Callable[[Key], list[int]]) -> None:
        self._missing = missing
        self._blocked: dict[int, Waits] = {}  # by rank: the last report that its only thread waits
        self._repeats: dict[int, int] = {}  # by rank: equal reports since another rank began to wait

    def report(self, rank: int, message: Waits) -> DeadLock | None:
        """Note that a rank's only thread waits, or goes on. Return the dead-lock that this shows, if any."""
        if message.at is None:
            self._blocked.pop(rank, None)
            return None
        earlier = self._blocked.get(rank)
        self._blocked[rank] = message
        if earlier is not None and earlier.at == message.at:
            self._repeats[rank] += 1
        else:
            # Earlier reports of other ranks may be out of date: a rank that reports late must not be taken for stuck.
            self._repeats = dict.fromkeys(self._blocked, 0)
        for peer in self._blocked:
            if peer != rank and self._wait_for_each_other(rank, peer):
                return self._break(*sorted((rank, peer)))
        return None

    def _waits_for(self, rank: int) -> list[int]:
        message = self._blocked[rank]
        return self._missing(Key(*message.at)) if isinstance(message.at, list) else message.waits_for

    def _wait_for_each_other(self, rank: int, peer: int) -> bool:
        """True if both wait in different operations that were meant to be the same, or one of them in a lane."""
        message, other = self._blocked[rank], self._blocked[peer]
        if message.at == other.at or not (self._repeats[rank] and self._repeats[peer]):
            return False
        if isinstance(message.at, list) and isinstance(other.at, list) and message.label != other.label:
            return False  # different names: a script may well submit the missing operation later, from elsewhere
        return peer in self._waits_for(rank) and rank in self._waits_for(peer)

    def _break(self, low: int, high: int) -> DeadLock:
        pair = [self._blocked[low], self._blocked[high]]
        text = (
            f"Mismatched operations: rank {low} waits in {pair[0].subject}, rank {high} waits in {pair[1].subject}; "
            f"each waits for the other.\n{for_dead_lock([message.subject for message in pair])}"
        )
        keys, lanes, stuck = [], [], {low, high}
        for message in pair:
            if isinstance(message.at, list):
                keys.append(Key(*message.at))
            elif message.at is not None:
                lanes.append((message.at, [member for member, at in self._blocked.items() if at.at == message.at]))
                stuck.update(lanes[-1][1])
        for rank in stuck:
            self._blocked.pop(rank)
        return DeadLock(text, keys, lanes)
