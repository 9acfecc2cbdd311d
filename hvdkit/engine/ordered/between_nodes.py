"""Collective calls between nodes: by messages, and within each node by its memory."""

from __future__ import annotations

import numpy as np

from hvdkit.collectives import exchange
from hvdkit.collectives.compressed import allreduce_encoded
from hvdkit.collectives.group import Array, Group, Steps
from hvdkit.collectives.hierarchical import layout_allreduce
from hvdkit.collectives.scratch import SCRATCH
from hvdkit.compression import CASTS
from hvdkit.engine.ordered.calls import (
    Collective,
    CollectiveKind,
    description_of,
    lengths_of,
    mismatch,
    parts_of,
    with_parts,
    words_of,
    wrong_lengths,
)
from hvdkit.engine.ranks.assignments import ordered_tag
from hvdkit.engine.ranks.turns import BUSY
from hvdkit.errors import MismatchError

_REDUCING = (CollectiveKind.ALL_REDUCE, CollectiveKind.REDUCE)
COMPARED_TAG = 7  # of the eight tags of an operation, that of its description


class NetworkRunner:
    """The runner of calls in a group whose ranks do not all share memory: on the wire several overlap."""

    most_in_flight = 4  # so that the wire is busy while others are summed, compared or wait

    def __init__(self, group: Group, group_number: int) -> None:
        self._group, self._group_number = group, group_number

    def run_now(self, call: Collective, number: int, seconds: float) -> int:
        """Return BUSY: no call between nodes runs at once."""
        return BUSY

    def run(self, call: Collective, number: int, has_arrived: bool) -> Steps[None]:
        """Run a call. Raises MismatchError on all ranks."""
        group, tag = self._group, ordered_tag(self._group_number, number)
        call = with_parts(call, group.rank, group.size)
        # The ranks of a node draw in the order of the calls, whose comparisons may end in another order.
        reduces = call.steps is None and call.kind in _REDUCING and call.source.size > 0
        turns = group.layout.draw() if group.layout is not None and reduces else (0, 0)
        if not call.is_agreed:
            yield from self._compare(call, number, tag + COMPARED_TAG)
        if call.steps is not None:
            yield from call.steps(tag)
        elif call.outgoing:
            yield from exchange.alltoall(group, call.outgoing, call.incoming, tag)
        elif call.kind == CollectiveKind.ALL_REDUCE:
            yield from self._allreduce(call, call.target, tag, turns)
        elif call.kind == CollectiveKind.REDUCE:
            yield from self._reduce(call, tag, turns)
        elif call.kind == CollectiveKind.REDUCE_SCATTER:
            yield from self._reduce_scatter(call, tag)
        elif call.kind == CollectiveKind.BROADCAST:
            buffer = call.source if group.rank == call.description.root else call.target
            yield from exchange.broadcast(group, buffer, call.description.root, tag)
        elif call.kind == CollectiveKind.ALL_GATHER:
            yield from exchange.allgather(group, call.source, parts_of(call.target, group.size), tag)
        elif call.kind == CollectiveKind.ALL_TO_ALL:
            parts = parts_of(call.source, group.size), parts_of(call.target, group.size)
            yield from exchange.alltoall(group, *parts, tag)

    def close(self) -> None:
        """Give the memory of the group back."""
        if (layout := self._group.layout) is not None and layout.staging is not None:
            layout.staging.leave()

    def _compare(self, call: Collective, number: int, tag: int) -> Steps[None]:
        """Send the description of a call to all ranks, and compare theirs. Raises MismatchError on all ranks."""
        group, words = self._group, np.array(words_of(call.description), dtype="<u8")
        lengths = lengths_of(call) if call.outgoing else np.zeros(2 * group.size, dtype="<i8")
        own = np.concatenate([words, lengths.view("<u8")])
        notices = np.empty((group.size, own.size), dtype=own.dtype)
        yield from exchange.allgather(group, own, list(notices), tag)
        if bool((notices[:, : words.size] != words).any()):
            descriptions = [description_of(notice[: words.size].tolist()) for notice in notices]
            raise MismatchError(mismatch(number, descriptions, group.members))
        if call.outgoing and (wrong := wrong_lengths(call, notices[:, words.size :].view("<i8"), group.members)):
            raise MismatchError(wrong)

    def _allreduce(self, call: Collective, flat: Array, tag: int, turns: tuple[int, int]) -> Steps[None]:
        group, layout, codec = self._group, self._group.layout, CASTS["none"]
        if not flat.size:
            return
        if layout is None:
            if flat is not call.source:
                flat[...] = call.source
            yield from allreduce_encoded(group, flat, call.op, call.scale, codec, tag, None)
        else:
            yield from layout_allreduce(group, layout, flat, call.op, call.scale, codec, tag, turns, call.source, None)

    def _reduce(self, call: Collective, tag: int, turns: tuple[int, int]) -> Steps[None]:
        """Reduce to the root; other ranks' results go into scratch memory."""
        if self._group.rank == call.description.root:
            yield from self._allreduce(call, call.target, tag, turns)
            return
        scratch = SCRATCH.take(call.source.nbytes)
        yield from self._allreduce(call, scratch[: call.source.nbytes].view(call.source.dtype), tag, turns)
        SCRATCH.give_back(scratch)  # not after an error: bytes may still come in

    def _reduce_scatter(self, call: Collective, tag: int) -> Steps[None]:
        group, source, each = self._group, call.source, call.target.size
        scratch = SCRATCH.take(source.nbytes)
        buffer = scratch[: source.nbytes].view(source.dtype)
        buffer[...] = source  # the reduction overwrites its buffer
        bounds = [(rank * each, (rank + 1) * each) for rank in range(group.size)]
        call.target[...] = yield from exchange.reduce_scatter(group, buffer, bounds, call.op, call.scale, tag)
        SCRATCH.give_back(scratch)
