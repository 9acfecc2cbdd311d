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

from hvdkit.collectives.group import Array
from hvdkit.kernels import ReduceOp, Scale

if TYPE_CHECKING:
    from hvdkit.engine.ops.device_operations import DeviceArray
    from hvdkit.engine.ops.requests import Call, ReduceRequest

# Operations that come again and have memory at the same time. What nobody uses of it costs nothing.
REGIONS = 256

# How long ranks wait for each other here. Where one comes later than that, asking earlier would have gained nothing.
PATIENCE_SECONDS = 200e-6
# In a turn, above what is counted of one operation: how often its region was given before.
_ROUND = 1 << 32


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


class _Repetition:
    """One operation that comes again."""

    __slots__ = ("begin", "op", "region", "scale", "turn", "under_way")

    def __init__(self, number: int, op: ReduceOp, scale: Scale) -> None:
        self.begin, self.region = number // REGIONS * _ROUND, number % REGIONS
        self.op, self.scale = op, scale
        self.turn, self.under_way = self.begin, Lock()


class Repetitions:
    """Those that this rank knows, of one process set whose ranks share the memory ``area``, a native Repeated."""

    def __init__(self, area: Any, most_bytes: int, give_back: Callable[[], None]) -> None:
        self._area, self._most_bytes = area, most_bytes
        self._give_back = give_back  # the area's memory, to the system
        self._known: dict[Content, _Repetition] = {}

    def __bool__(self) -> bool:
        return bool(self._known)

    def knows(self, name: str | None) -> bool:
        """Whether an operation of this name, or one without, comes again."""
        return any(content.name == name for content in self._known)

    def learn(self, content: Content, nbytes: int, number: int, op: ReduceOp, scale: Scale) -> None:
        """An operation has the region ``number`` from now on; ``op`` and ``scale`` are how ranks do it."""
        if nbytes <= self._most_bytes:
            self._known[content] = _Repetition(number, op, scale)

    def reduce(
        self, array: Array | DeviceArray, source: Array | None, request: ReduceRequest, call: Call, asks: bool
    ) -> bool:
        """Whether the array has its reduction now; else it must be submitted, as where the caller ``asks`` anyway."""
        content = Content(call.name, array.dtype, array.shape, request.op, request.postscale)
        known = self._known.get(content)
        is_plain = request.prescale == 1.0 and not request.codec.encodes and call.device == "cpu"
        if known is None or not is_plain or not isinstance(array, np.ndarray):
            return False
        turn = known.turn = known.turn + 1 if call.number is None else known.begin + call.number + 1
        if not known.under_way.acquire(blocking=False):
            return False  # the others see in moments that this rank does not come, and this region is in use
        try:
            if asks:
                self._area.withdraw(known.region, turn)
                return False
            done: bool = self._area.allreduce(
                known.region,
                turn,
                array.reshape(-1),
                known.op,
                known.scale,
                None if source is None else source.reshape(-1),
                PATIENCE_SECONDS,
            )
        finally:
            known.under_way.release()
        return done

    def forget(self, name: str | None) -> None:
        """An operation of this name, or one without, failed: ranks may have counted differently."""
        for content in [one for one in self._known if one.name == name]:
            self._known.pop(content, None)

    def forget_all(self) -> None:
        """A rank has joined, and does not count."""
        self._known.clear()

    def leave(self) -> None:
        """The process set is no more."""
        self._known.clear()
        self._give_back()
