"""Small allreduces that recur on one node: its ranks reduce them below Python, without the coordinator.

When such an operation comes for the second time, the order to run it carries the number of a region of node memory.
Each later call has a turn, the same on all ranks, which count the calls under a name from there on, and calls without a
name from the beginning. A call is withdrawn on all ranks (see csrc/repeated.h) and goes through the coordinator if not
all come within moments, or if it is submitted in another way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hvdkit.collectives.group import Array, Group, two_phase_bytes
from hvdkit.kernels import ReduceOp, Scale

if TYPE_CHECKING:
    from hvdkit.engine.ops.batch import DeviceArray
    from hvdkit.engine.ops.requests import Call, ReduceRequest

REGIONS = 256  # operations that have memory at the same time; unused memory costs nothing
PATIENCE_SECONDS = 200e-6  # of ranks for each other; if one comes later, the coordinator would not have been slower
# A turn: how often its region was assigned before, then the count of one operation. It has 48 bits in the region's
# memory (transports/csrc/repeated); calls and numbers that need more go to the coordinator.
_ROUND, _ROUNDS = 1 << 32, 1 << 16


def most_bytes(ranks: int) -> int:
    """Return the size of the largest operation that has memory. Each rank reads the arrays of all ranks."""
    return max(4 * 1024, 128 * 1024 // ranks)


class Content(NamedTuple):
    """The fields that are equal in all calls of a recurring operation."""

    name: str | None
    dtype: Any
    shape: tuple[int, ...]
    op: int
    postscale: float


@dataclass(slots=True)
class _Region:
    """The turns of this rank in a region. They ascend and do not overlap, on which the other ranks rely."""

    last: int = 0
    lock: Lock = field(default_factory=Lock)


class _Repetition:
    """A recurring operation. ``begin``: its turn before the first; ``done``: how often it ran since."""

    def __init__(self, number: int, op: ReduceOp, scale: Scale) -> None:
        self.begin = number // REGIONS * _ROUND
        self.region = number % REGIONS
        self.op, self.scale = op, scale
        self.done = 0


class Repetitions:
    """The recurring operations of a process set whose ranks share the memory ``area``, a native Repeated."""

    def __init__(self, group: Group, area: Any, most_bytes: int, give_back: Callable[[], None]) -> None:
        self._group, self._area, self._most_bytes = group, area, most_bytes
        self._give_back = give_back  # frees the area's memory
        self._repetitions: dict[Content, _Repetition] = {}
        self._regions: dict[int, _Region] = {}
        self.under_way: set[str | None] = set()  # the names of operations that this rank runs now

    def __bool__(self) -> bool:
        return bool(self._repetitions)

    def knows(self, name: str | None) -> bool:
        """True if an operation of this name, or without a name, recurs."""
        return any(content.name == name for content in self._repetitions)

    def learn(self, content: Content, nbytes: int, number: int, op: ReduceOp, scale: Scale) -> None:
        """Assign the region ``number`` to an operation, which ranks reduce by ``op`` and ``scale``."""
        if nbytes > self._most_bytes or number >= REGIONS * _ROUNDS:
            return
        region = number % REGIONS
        self._regions.setdefault(region, _Region())
        for old in [old for old, repetition in self._repetitions.items() if repetition.region == region]:
            self._repetitions.pop(old, None)
        self._repetitions[content] = _Repetition(number, op, scale)

    def ran(self, content: Content) -> None:
        """Count an operation that ran through the coordinator."""
        if content in self._repetitions:
            self._repetitions[content].done += 1

    def reduce(
        self, array: Array | DeviceArray, source: Array | None, request: ReduceRequest, call: Call, negotiates: bool
    ) -> bool:
        """Reduce an array. Return False if it must be submitted, as always when the caller ``negotiates``."""
        content = Content(call.name, array.dtype, array.shape, request.op, request.postscale)
        repetition = self._repetitions.get(content)
        is_plain = request.prescale == 1.0 and not request.codec.encodes and call.device == "cpu"
        if repetition is None or not is_plain or not isinstance(array, np.ndarray):
            return False
        count, region = repetition.done if call.number is None else call.number, self._regions[repetition.region]
        if count + 1 >= _ROUND:
            return False
        turn = repetition.begin + 1 + count
        if not region.lock.acquire(blocking=False):
            return False  # another thread is in this region; the other ranks notice that this rank does not come
        try:
            if turn <= region.last:
                return False
            region.last = turn
            if negotiates:
                self._area.withdraw(repetition.region, turn)
                return False
            self.under_way.add(call.name)
            flat, source = array.reshape(-1), None if source is None else source.reshape(-1)
            done: bool = self._area.allreduce(
                repetition.region, turn, flat, repetition.op, repetition.scale, source, PATIENCE_SECONDS
            )
            if done:
                repetition.done += 1
                self._group.bytes_sent += two_phase_bytes(array.nbytes, self._group.size)
            return done
        finally:
            self.under_way.discard(call.name)
            region.lock.release()

    def forget(self, name: str | None) -> None:
        """Forget operations of this name, or without a name: one failed, and ranks may have counted differently."""
        for content in [content for content in self._repetitions if content.name == name]:
            self._repetitions.pop(content, None)

    def forget_all(self) -> None:
        """Forget all operations."""
        self._repetitions.clear()

    def leave(self) -> None:
        """End the operations of a removed process set. The last of its ranks frees their memory."""
        self._repetitions.clear()
        for region in self._regions.values():
            region.lock.acquire(timeout=10 * PATIENCE_SECONDS)  # for good
        if self._area.leave():
            self._give_back()
