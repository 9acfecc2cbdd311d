"""Small allreduces that come again, on one node: its ranks agree on them and reduce them below Python, asking nobody.

When one comes for the second time, the coordinator's word to run it carries the number of a region of node memory.
A call after that has a turn, the same on all ranks: ranks count the calls under a name from there on, and those without
a name in any case. A call for which not all ranks are there within moments, and what is submitted in another way, is
withdrawn for all ranks (see csrc/repeated.h) and goes through the coordinator, which knows about late and lost ranks,
joins and mistakes.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hvdkit.collectives.group import Array, Group, two_phase_bytes
from hvdkit.kernels import ReduceOp, Scale

if TYPE_CHECKING:
    from hvdkit.engine.ops.batch import DeviceArray
    from hvdkit.engine.ops.requests import Call, ReduceRequest

# Operations that come again and have memory at the same time. What nobody uses of it costs nothing.
REGIONS = 256

# How long ranks wait for each other here. Where one comes later than that, asking earlier would have gained nothing.
PATIENCE_SECONDS = 200e-6
# In a turn, above what is counted of one operation: how often its region was given before. A turn has 48 bits in the
# region's memory (csrc/repeated); calls and numbers that would take more are for the coordinator.
_ROUND, _ROUNDS = 1 << 32, 1 << 16


def most_bytes(ranks: int) -> int:
    """The largest operation for which there is memory. Each rank reads what all have brought."""
    return max(4 * 1024, 128 * 1024 // ranks)


class Content(NamedTuple):
    """What calls share that are repetitions of one operation."""

    name: str | None
    dtype: Any
    shape: tuple[int, ...]
    op: int
    postscale: float


class _Region:
    """What this rank does in one region: one turn at a time, and only later ones after it, as others rely on."""

    __slots__ = ("last", "lock")

    def __init__(self) -> None:
        self.last, self.lock = 0, Lock()


class _Repetition:
    """One operation that comes again. ``done``: how often it ran under its name since it has its region."""

    __slots__ = ("begin", "done", "op", "region", "scale")

    def __init__(self, number: int, op: ReduceOp, scale: Scale) -> None:
        self.begin, self.region = number // REGIONS * _ROUND, number % REGIONS
        self.op, self.scale, self.done = op, scale, 0


class Repetitions:
    """Those that this rank knows, of one process set whose ranks share the memory ``area``, a native Repeated."""

    def __init__(self, group: Group, area: Any, most_bytes: int, give_back: Callable[[], None]) -> None:
        self._group, self._area, self._most_bytes = group, area, most_bytes
        self._give_back = give_back  # the area's memory, to the system
        self._known: dict[Content, _Repetition] = {}
        self._regions: dict[int, _Region] = {}
        self.under_way: set[str | None] = set()  # the names of those that this rank is in

    def __bool__(self) -> bool:
        return bool(self._known)

    def knows(self, name: str | None) -> bool:
        """Whether an operation of this name, or one without, comes again."""
        return any(content.name == name for content in self._known)

    def learn(self, content: Content, nbytes: int, number: int, op: ReduceOp, scale: Scale) -> None:
        """An operation has the region ``number`` from now on; ``op`` and ``scale`` are how ranks do it."""
        if nbytes > self._most_bytes or number >= REGIONS * _ROUNDS:
            return
        new = _Repetition(number, op, scale)
        self._regions.setdefault(new.region, _Region())
        for old in [one for one, known in self._known.items() if known.region == new.region]:
            self._known.pop(old, None)
        self._known[content] = new

    def ran(self, content: Content) -> None:
        """The operation ran as the coordinator said."""
        known = self._known.get(content)
        if known is not None:
            known.done += 1

    def reduce(
        self, array: Array | DeviceArray, source: Array | None, request: ReduceRequest, call: Call, asks: bool
    ) -> bool:
        """Whether the array has its reduction now; else it must be submitted, as where the caller ``asks`` anyway."""
        content = Content(call.name, array.dtype, array.shape, request.op, request.postscale)
        known = self._known.get(content)
        is_plain = request.prescale == 1.0 and not request.codec.encodes and call.device == "cpu"
        if known is None or not is_plain or not isinstance(array, np.ndarray):
            return False
        count = known.done if call.number is None else call.number
        if count + 1 >= _ROUND:
            return False
        turn = known.begin + 1 + count
        region = self._regions[known.region]
        if not region.lock.acquire(blocking=False):
            return False  # another thread is in this region; the other ranks see in moments that this one does not come
        try:
            if turn <= region.last:
                return False
            region.last = turn
            if asks:
                self._area.withdraw(known.region, turn)
                return False
            self.under_way.add(call.name)
            done: bool = self._area.allreduce(
                known.region,
                turn,
                array.reshape(-1),
                known.op,
                known.scale,
                None if source is None else source.reshape(-1),
                PATIENCE_SECONDS,
            )
            if done:
                known.done += 1
                self._group.bytes_sent += two_phase_bytes(array.nbytes, self._group.size)
            return done
        finally:
            self.under_way.discard(call.name)
            region.lock.release()

    def forget(self, name: str | None) -> None:
        """An operation of this name, or one without, failed: ranks may have counted differently."""
        for content in [one for one in self._known if one.name == name]:
            self._known.pop(content, None)

    def forget_all(self) -> None:
        """A rank has joined, and does not count."""
        self._known.clear()

    def leave(self) -> None:
        """The process set is no more; who is the last of its ranks to say so gives its memory back."""
        self._known.clear()
        for region in self._regions.values():
            region.lock.acquire(timeout=10 * PATIENCE_SECONDS)  # for good
        if self._area.leave():
            self._give_back()
