"""Collective calls within a node: by parts published at a turn, by chunks, or in memory that all ranks map.

The methods are generators that yield transfers, as the algorithms in ``hvdkit.collectives``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from hvdkit import kernels
from hvdkit.arena import ARENA, SMALLEST_BYTES
from hvdkit.collectives import exchange
from hvdkit.collectives.group import Array, Group, Steps, equal_parts, equal_runs, is_same, partition
from hvdkit.collectives.staging import Mode, Staging
from hvdkit.engine.ordered.calls import (
    Collective,
    CollectiveKind,
    description_of,
    lengths_of,
    mismatch,
    reading_of,
    with_parts,
    words_of,
    wrong_lengths,
)
from hvdkit.engine.ranks.assignments import ordered_tag
from hvdkit.engine.ranks.turns import BUSY, COMPLETE, DIFFERENT, OPEN, Reading
from hvdkit.errors import MismatchError

SPIN_SECONDS = 20e-6  # for which a wait at a turn watches the other ranks before other operations get on


class _TurnWait:
    """A wait, like a transfer, until ``behind`` returns none of the group's ranks."""

    __slots__ = ("_behind", "_members", "_turns", "peer")

    def __init__(self, turns: Any, behind: Callable[[float], list[int]], members: Sequence[int]) -> None:
        self._turns, self._behind, self._members, self.peer = turns, behind, members, -1
        turns.watch(1)

    def awaited(self) -> list[int]:
        """Return the ranks that this rank waits for."""
        return [self._members[index] for index in self._behind(0.0)]

    def done(self) -> bool:
        if self._turns is not None and not self._behind(SPIN_SECONDS):
            self._turns.watch(-1)
            self._turns = None
        return self._turns is None


class NodeRunner:
    """The runner of calls in a group whose ranks all share memory; ``turns``: the group's turns in that memory.

    ``arenas``: the arena of each rank, None for an arena that this rank cannot map.
    """

    most_in_flight = 1  # a turn has the memory of the turn before the last

    def __init__(self, group: Group, group_number: int, turns: Any, arenas: Sequence[Any]) -> None:
        self._group, self._group_number, self._turns = group, group_number, turns
        self._staging: Staging = group.layout.staging
        self._arenas = [None if window is None else np.frombuffer(window, dtype=np.uint8) for window in arenas]
        self._has_arenas = all(arena is not None for arena in self._arenas)

    def run_now(self, call: Collective, number: int, seconds: float) -> int:
        """Try for ``seconds`` to run a call at once; return the state of its turn."""
        if not self._fits(call):
            return BUSY
        reading = reading_of(call, self._group.rank, self._group.size)
        words, root = words_of(call.description), call.description.root
        state: int = self._turns.run(
            number, words, call.source, call.target, *reading, root, call.op, call.scale, seconds
        )
        return state

    def run(self, call: Collective, number: int, has_arrived: bool) -> Steps[None]:
        """Run a call. ``has_arrived``: its part is published already. Raises MismatchError on all ranks."""
        turns, group = self._turns, self._group
        if self._fits(call):
            yield from self._meet(call, number, has_arrived, call.source)
            reading, begin = reading_of(call, group.rank, group.size)
            turns.read(number, call.target, reading, begin, call.description.root, call.op, call.scale)
            return
        call = with_parts(call, group.rank, group.size)
        tag = ordered_tag(self._group_number, number)
        if call.steps is not None:
            yield from self._meet(call, number, has_arrived, None)
            turns.finish(number)
            yield from call.steps(tag)
            return
        if call.outgoing:
            yield from self._meet(call, number, has_arrived, lengths_of(call))
            lengths = np.empty((group.size, 2 * group.size), dtype="<i8")
            turns.read(number, lengths.reshape(-1), Reading.GATHER, 0, 0, call.op, call.scale)
            if wrong := wrong_lengths(call, lengths, group.members):
                raise MismatchError(wrong)
            yield from exchange.alltoall(group, call.outgoing, call.incoming, tag)
            return
        offset, is_over = -1, False
        if self._has_arenas and _moves_in_place(call):
            offset = ARENA.pin(call.source.ctypes.data, call.source.nbytes)
        try:
            # The first chunk is there when the others hear of this rank, so that none of them waits twice.
            staged = self._stage(call) if offset < 0 else None
            yield from self._meet(call, number, has_arrived, None, offset + 1)
            offsets = [words[4] - 1 for words in turns.words(number)]
            if min(offsets) >= 0:
                self._run_in_place(call, self._sources(call, offsets))
                turns.finish(number)
                # The others may still read this rank's memory, and write to it.
                yield [_TurnWait(turns, partial(turns.readers, number), group.members)]
            else:
                yield [self._staging.under_way(staged or self._stage(call))]
                turns.finish(number)
            is_over = True
        finally:
            if offset >= 0:
                if is_over:
                    ARENA.unpin([offset])
                else:  # a rank that was stopped may still write there later
                    ARENA.unpin_failed([offset], group.transport.is_elastic)

    def close(self) -> None:
        """Give the memory of the group back when its last rank leaves."""
        if self._turns.leave():
            self._staging.window.give_back(0, memoryview(self._staging.window).nbytes)

    def _fits(self, call: Collective) -> bool:
        """True if the ranks publish their parts of a call at its turn."""
        travels = bool(call.outgoing) or call.steps is not None
        return not travels and call.part_bytes(self._group.size) <= self._turns.most_bytes()

    def _meet(self, call: Collective, number: int, has_arrived: bool, part: Array | None, own: int = 0) -> Steps[None]:
        """Publish a call with this rank's part of it, wait for the other ranks, and compare."""
        turns, members, words = self._turns, self._group.members, words_of(call.description, own)
        while not has_arrived and turns.arrive(number, words, part) == BUSY:
            yield [_TurnWait(turns, partial(turns.readers, number - 2), members)]
        state = turns.wait(number, self._staging.spin_seconds)
        if state == OPEN:
            yield [_TurnWait(turns, partial(turns.absent, number), members)]
            state = turns.wait(number, 0.0)
        if state == DIFFERENT:
            descriptions = [description_of(words) for words in turns.words(number)]
            turns.finish(number)
            raise MismatchError(mismatch(number, descriptions, members))
        assert state == COMPLETE, state

    def _stage(self, call: Collective) -> Any:
        """Begin a pass over the node's slots, and put the first chunk into this rank's."""
        size, me, root = self._group.size, self._group.rank, call.description.root
        source, target = call.source, call.target
        array, own, mode, shares = target, None, Mode.ALLREDUCE, equal_runs(target.size, size)
        if call.kind == CollectiveKind.ALL_REDUCE:
            shares = partition(target.size, size, target.itemsize)
        elif call.kind == CollectiveKind.REDUCE_SCATTER:
            array, own, mode, shares = source, target, Mode.REDUCE_SCATTER, equal_runs(source.size, size)
        elif call.kind == CollectiveKind.REDUCE:
            array, own, mode, shares = source, target if me == root else None, Mode.REDUCE_SCATTER, [(0, 0)] * size
            shares[root] = (0, source.size)
        elif call.kind == CollectiveKind.BROADCAST:
            array, mode, shares = source if me == root else target, Mode.ALLGATHER, [(0, 0)] * size
            shares[root] = (0, array.size)
        elif call.kind == CollectiveKind.ALL_GATHER:
            mode, part = Mode.ALLGATHER, equal_parts(target, size)[me]
            if not is_same(part, source):
                part[...] = source
        else:
            assert call.kind == CollectiveKind.ALL_TO_ALL, call.kind
            mode = Mode.EXCHANGE
        takes_source = mode in (Mode.ALLREDUCE, Mode.EXCHANGE) and not is_same(source, target)
        staged = self._staging.new_pass(
            0, mode, array, shares, call.op, call.scale, source if takes_source else None, own
        )
        staged.stage()
        return staged

    def _sources(self, call: Collective, offsets: Sequence[int]) -> list[Array]:
        """Return all ranks' sources: this rank's own, and the others' as this process maps them."""
        nbytes, sources = call.source.nbytes, []
        for rank, (arena, offset) in enumerate(zip(self._arenas, offsets, strict=True)):
            assert arena is not None
            mapped = arena[offset : offset + nbytes].view(call.source.dtype)
            sources.append(call.source if rank == self._group.rank else mapped)
        return sources

    def _run_in_place(self, call: Collective, sources: Sequence[Array]) -> None:
        """Run a call out of all ranks' sources."""
        size, me, target = self._group.size, self._group.rank, call.target
        if call.kind == CollectiveKind.ALL_REDUCE:
            begin, end = partition(target.size, size, target.itemsize)[me]
            shares = [source[begin:end] for source in sources]
            kernels.reduce_into(shares, shares, call.op, call.scale)
            return
        if call.kind == CollectiveKind.REDUCE_SCATTER:
            shares = [equal_parts(source, size)[me] for source in sources]
            kernels.reduce_into(target, shares, call.op, call.scale)
            return
        for step in range(size):  # each rank begins with its own part, so that ranks do not all read one rank's memory
            rank = (me + step) % size
            part = sources[rank] if call.kind == CollectiveKind.ALL_GATHER else equal_parts(sources[rank], size)[me]
            into = equal_parts(target, size)[rank]
            if not is_same(into, part):
                into[...] = part


def _moves_in_place(call: Collective) -> bool:
    """True if a call runs out of the arenas, where all sources lie there."""
    in_place = call.kind == CollectiveKind.ALL_REDUCE and is_same(call.source, call.target)
    elsewhere = call.kind in (CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_GATHER, CollectiveKind.ALL_TO_ALL)
    return call.source.nbytes >= SMALLEST_BYTES and (in_place or elsewhere)
