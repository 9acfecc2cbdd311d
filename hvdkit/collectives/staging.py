"""Staging: collectives of a node's ranks on tensors that lie anywhere, through chunks in memory that they share.

A rank copies the data that others need into its slot, reduces its own share in rank order, and copies the others'
results out of their slots: chunk by chunk, in the cache, or between cores that share none through memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any

from hvdkit.collectives.group import Array, Runs, Steps
from hvdkit.kernels import ReduceOp, Scale

# The slots of one rank: this many chunks may be under way. Two ranks' slots fit into a second-level cache of 2 MB.
DEPTH = 4
SLOT_BYTES = 256 * 1024
# Up to this size every rank reduces the whole tensor, since one exchange is quicker than two; it must fit into a slot.
WHOLE_BYTES = 32 * 1024
# From this size on the way of the handover matters, and a measurement of 1 to 2 us does not.
MEASURED_BYTES = 256 * 1024
# On an AMD EPYC, reading a line that another core had just written took 12 to 20 ns where the two cores shared a cache,
# else 60 to 100 ns. Without a shared cache, 100 MB took 33 ms through the caches and 22 ms through memory; with one, 13
# and 24 ms. The case changes while a job runs, as the system moves processes between cores.
FAR_SECONDS = 50e-9


class Mode(IntEnum):
    """The operation on the shares, with the numbers of transports/csrc/staged.h."""

    ALLREDUCE = 0
    REDUCE_SCATTER = 1
    ALLGATHER = 2
    WHOLE = 3
    EXCHANGE = 4


class AreaQueue:
    """An area of slots that operations use one at a time, in the order of their tickets, alike on all ranks."""

    def __init__(self, area: Any) -> None:
        self.area = area
        self.passed = 0
        self._drawn = 0

    def draw(self) -> int:
        """Return the next ticket. All members draw in the same order, when operations start."""
        self._drawn += 1
        return self._drawn - 1

    def is_left(self) -> bool:
        """True if all operations are over, on the other ranks too."""
        return self.passed == self._drawn and self.area.left_by_others()


class Turn:
    """A wait, like a transfer, until ``queue.passed`` is a ticket: earlier operations of this rank come first."""

    __slots__ = ("_queue", "_ticket", "peer")

    def __init__(self, queue: Any, ticket: int, peer: int) -> None:
        self._queue, self._ticket = queue, ticket
        self.peer = peer

    def done(self) -> bool:
        return bool(self._queue.passed == self._ticket)


class Pass:
    """A staged operation under way, as a transfer: ``done`` moves it on."""

    __slots__ = ("_members", "_spin_seconds", "_staged", "peer")

    def __init__(self, staged: Any, members: Sequence[int], spin_seconds: float) -> None:
        self._staged, self._members, self._spin_seconds = staged, members, spin_seconds
        self.peer = -1

    def done(self) -> bool:
        return bool(self._staged.advance(self._spin_seconds))

    def awaited(self) -> list[int]:
        """Return the ranks that have not done their part yet."""
        return [self._members[index] for index in self._staged.awaited()]


def staging_bytes(ranks: int) -> int:
    """Return the bytes of the two areas of so many ranks."""
    from hvdkit.kernels._native import Area

    return 2 * Area.bytes_needed(ranks, DEPTH, SLOT_BYTES)


class Staging:
    """The memory that the ranks ``members`` of a node (ranks of the transport, ascending) share for one group.

    Two areas lie in ``window`` from ``begin`` on: no operation's first half waits for another one's second half, which
    may come after a trip to other nodes. ``wakeups`` are the members'.
    """

    def __init__(
        self, members: Sequence[int], rank: int, window: Any, begin: int, wakeups: list[Any], spin_seconds: float
    ) -> None:
        from hvdkit.kernels._native import Area, Staged

        self.members = list(members)
        self.me = self.members.index(rank)
        self._rank = rank
        self._staged = Staged
        count = len(self.members)
        self._begins = (begin, begin + staging_bytes(count) // 2)  # of the areas in the window
        self.queues = [AreaQueue(Area(window, at, count, self.me, DEPTH, SLOT_BYTES, wakeups)) for at in self._begins]
        self.spin_seconds = spin_seconds
        self.window = window

    def leave(self) -> None:
        """Give the memory of a group that ended back to the system, where no rank can be in it any more."""
        for start, queue in zip(self._begins, self.queues, strict=True):
            if queue.is_left():
                begin, nbytes = queue.area.own_slots()
                self.window.give_back(start + begin, nbytes)

    def why_handover(self, nbytes: int) -> str:
        """Return the way in which chunks of a tensor of ``nbytes`` bytes are handed over and why, for people."""
        return choose_handover(nbytes, self.queues[0].area.line_seconds())[1]

    def run(
        self,
        half: int,
        ticket: int,
        mode: Mode,
        flat: Array,
        shares: Runs,
        op: ReduceOp,
        scale: Scale,
        source: Array | None = None,
    ) -> Steps[None]:
        """Make one pass over ``flat``, out of ``source`` if given; ``shares`` are the members' elements."""
        yield from self.enter(half, ticket)
        yield [self.under_way(self.new_pass(half, mode, flat, shares, op, scale, source))]
        self.queues[half].passed += 1

    def enter(self, half: int, ticket: int) -> Steps[None]:
        """Wait until an area serves a ticket; then passes run there until the caller increments ``passed``."""
        if self.queues[half].passed != ticket:
            yield [Turn(self.queues[half], ticket, self._rank)]

    def under_way(self, staged: Any) -> Pass:
        """Return a native pass as a transfer that moves it on."""
        return Pass(staged, self.members, self.spin_seconds)

    def new_pass(
        self,
        half: int,
        mode: Mode,
        flat: Array,
        shares: Runs,
        op: ReduceOp,
        scale: Scale,
        source: Array | None = None,
        own: Array | None = None,
    ) -> Any:
        """Return a native pass, the next one in its area; ``own``: the place of this rank's share of a reduction."""
        area, measure = self.queues[half].area, flat.nbytes >= MEASURED_BYTES
        past_cache = choose_handover(flat.nbytes, area.line_seconds())[0] if measure else []
        return self._staged(area, int(mode), flat, op, scale, list(shares), source, past_cache, measure, own)


def choose_handover(nbytes: int, line_seconds: Sequence[float]) -> tuple[list[bool], str]:
    """Return for each member True if data for it is written past the cache, into memory; and the reason.

    ``line_seconds``: for each member, the time of reading a line that it has just written, 0 if unknown.
    """
    if nbytes < MEASURED_BYTES:
        return [False] * len(line_seconds), f"less than {MEASURED_BYTES} bytes: handed over in the cache"
    slowest = max(line_seconds)
    measured = f"a line that another rank wrote takes {1e9 * slowest:.0f} ns" if slowest else "not measured yet"
    far = [seconds > FAR_SECONDS for seconds in line_seconds]
    way = f"through memory, for {sum(far)} of {len(far) - 1} others to sum" if any(far) else "in the cache"
    return far, f"{measured}: handed over {way}"


def choose_pass(nbytes: int) -> tuple[Mode, str]:
    """Return the mode in which a node's ranks reduce a tensor of ``nbytes`` bytes, and the reason."""
    return _SMALL_PASS if nbytes <= WHOLE_BYTES else _LARGE_PASS


_SMALL_PASS = (Mode.WHOLE, f"at most {WHOLE_BYTES} bytes: every rank of the node reduces all of it, in one exchange")
_LARGE_PASS = (Mode.ALLREDUCE, f"more than {WHOLE_BYTES} bytes: each rank of the node reduces its share")
