"""Collective calls between nodes: by messages, and within each node by its memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from hvdkit import kernels
from hvdkit.collectives import exchange
from hvdkit.collectives.by_node import NodeExchange, RankExchange, is_regular
from hvdkit.collectives.compressed import allreduce_encoded
from hvdkit.collectives.group import Array, Group, Steps, equal_parts
from hvdkit.collectives.hierarchical import layout_allreduce
from hvdkit.collectives.scratch import SCRATCH
from hvdkit.compression import CASTS
from hvdkit.engine.ordered.calls import (
    NO_ARRAY,
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
from hvdkit.engine.ranks.turns import BUSY, Reading
from hvdkit.errors import MismatchError
from hvdkit.transports.base import Transfer

COMPARED_TAG = 7  # of the eight tags of an operation, that of its description
# The most bytes of a part that travels with the description of its call: 2 us at 10 Gb/s, where a trip takes 50 us or
# more. Every comparison carries room for this many to each rank, and to all together for no more than MOST_BYTES.
MOST_PART_BYTES, MOST_BYTES = 2048, 24 * 1024
# From this size on, 2 hosts of 2 ranks at 10 Gb/s won more time on the wire than they lost on the way through their
# nodes' memory: 4 MB took 7 ms either way, 32 MB 26 to 35 ms in place of 36 to 48.
SMALLEST_BY_NODE_BYTES = 4 * 1024 * 1024
_SPLITTING = (CollectiveKind.SCATTER, CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_TO_ALL)  # a part for each rank


class NetworkRunner:
    """The runner of calls in a group whose ranks do not all share memory: on the wire several overlap."""

    most_in_flight = 4  # so that the wire is busy while others are summed, compared or wait

    def __init__(self, group: Group, group_number: int) -> None:
        self._group, self._group_number = group, group_number
        self._by_rank = RankExchange(group)
        self._by_node = NodeExchange(group) if is_regular(group) else None

    def run_now(self, call: Collective, number: int, seconds: float) -> int:
        """Return BUSY: no call between nodes runs at once."""
        return BUSY

    def run(self, call: Collective, number: int, has_arrived: bool) -> Steps[None]:
        """Run a call. Raises MismatchError on all ranks."""
        group, tag = self._group, ordered_tag(self._group_number, number)
        if not call.is_agreed and _fits(call, group.size):
            yield from self._run_with_description(call, number, tag + COMPARED_TAG)
            return
        call = with_parts(call, group.rank, group.size)
        # The ranks of a node draw in the order of the calls, whose comparisons may end in another order.
        steps = self._steps(call, tag)
        if not call.is_agreed:
            yield from self._compare(call, number, tag + COMPARED_TAG, [NO_ARRAY] * group.size)
        yield from steps

    def _run_with_description(self, call: Collective, number: int, tag: int) -> Steps[None]:
        """Run a call whose parts travel with the description."""
        group, me, source = self._group, self._group.rank, call.source.view("u1")
        outgoing = equal_parts(source, group.size) if call.kind in _SPLITTING else [source] * group.size
        notices = yield from self._compare(call, number, tag, outgoing)
        reading, _ = reading_of(call, me, group.size)
        count = call.target.nbytes // group.size if reading == Reading.GATHER else call.target.nbytes
        parts = [notice[:count].view(call.target.dtype) for notice in notices]
        if reading == Reading.REDUCE:
            kernels.reduce_into(call.target, parts, call.op, call.scale)
        elif reading == Reading.GATHER:
            call.target[...] = np.concatenate(parts)
        elif reading == Reading.COPY:
            call.target[...] = parts[call.description.root]

    def _steps(self, call: Collective, tag: int) -> Iterable[list[Transfer]]:
        """Return the steps of a call, and draw its tickets in the memory of this node."""
        group, root = self._group, call.description.root
        if call.steps is not None:
            return _steps_of(call, tag)
        if call.outgoing:
            return exchange.alltoall(group, call.outgoing, call.incoming, tag)
        if not call.arrays:
            return ()
        if call.kind in (CollectiveKind.ALL_REDUCE, CollectiveKind.REDUCE):
            turns = group.layout.draw() if group.layout is not None else (0, 0)
            return (self._allreduce if call.target.size else self._reduce_to_another)(call, call.target, tag, turns)
        is_large = max(call.source.nbytes, call.target.nbytes) >= SMALLEST_BY_NODE_BYTES
        way = self._by_node if self._by_node is not None and is_large else self._by_rank
        if call.kind == CollectiveKind.REDUCE_SCATTER:
            return way.reduce_scatter(call.source, call.target, call.op, call.scale, tag)
        if call.kind == CollectiveKind.ALL_GATHER:
            return way.allgather(call.source, call.target, tag)
        if call.kind == CollectiveKind.BROADCAST:
            return way.broadcast(call.source if group.rank == root else call.target, root, tag)
        assert call.kind == CollectiveKind.ALL_TO_ALL, call.kind
        return exchange.alltoall(group, equal_parts(call.source, group.size), equal_parts(call.target, group.size), tag)

    def close(self) -> None:
        """Give the memory of the group back."""
        if (layout := self._group.layout) is not None and layout.staging is not None:
            layout.staging.leave()

    def _compare(self, call: Collective, number: int, tag: int, parts: Sequence[Array]) -> Steps[Array]:
        """Send the description of a call to all ranks, with a part (bytes) for each, and compare theirs.

        Returns the parts of all ranks, each with zeros behind it. Raises MismatchError on all ranks.
        """
        group, words = self._group, np.array(words_of(call.description), dtype="<u8")
        lengths = lengths_of(call) if call.outgoing else np.zeros(2 * group.size, dtype="<i8")
        own = np.concatenate([words.view("u1"), lengths.view("u1")])
        sent = np.zeros((group.size, own.size + _most_bytes(group.size)), dtype="u1")
        sent[:, : own.size] = own
        for notice, part in zip(sent, parts, strict=True):
            notice[own.size : own.size + part.size] = part
        notices = np.empty_like(sent)
        yield from exchange.alltoall(group, list(sent), list(notices), tag)
        described = notices[:, : own.size].view("<u8")
        if bool((described[:, : words.size] != words).any()):
            descriptions = [description_of(notice[: words.size].tolist()) for notice in described]
            raise MismatchError(mismatch(number, descriptions, group.members))
        if call.outgoing and (wrong := wrong_lengths(call, described[:, words.size :].view("<i8"), group.members)):
            raise MismatchError(wrong)
        return notices[:, own.size :]

    def _allreduce(self, call: Collective, flat: Array, tag: int, turns: tuple[int, int]) -> Steps[None]:
        group, layout, codec = self._group, self._group.layout, CASTS["none"]
        if layout is None:
            if flat is not call.source:
                flat[...] = call.source
            yield from allreduce_encoded(group, flat, call.op, call.scale, codec, tag, None)
        else:
            yield from layout_allreduce(group, layout, flat, call.op, call.scale, codec, tag, turns, call.source, None)

    def _reduce_to_another(self, call: Collective, _: Array, tag: int, turns: tuple[int, int]) -> Steps[None]:
        """Reduce to another rank, with this rank's result in scratch memory."""
        scratch = SCRATCH.take(call.source.nbytes)
        yield from self._allreduce(call, scratch[: call.source.nbytes].view(call.source.dtype), tag, turns)
        SCRATCH.give_back(scratch)  # not after an error: bytes may still come in


def _fits(call: Collective, size: int) -> bool:
    """True if the parts of a call travel with its description; alike on all ranks."""
    if call.outgoing or call.steps is not None:
        return False
    return call.part_bytes(size) <= _most_bytes(size) * (size if call.kind in _SPLITTING else 1)


def _most_bytes(size: int) -> int:
    """Return the most bytes of a part that travels with the description, in a group of ``size`` ranks."""
    return min(MOST_PART_BYTES, MOST_BYTES // size // 16 * 16)


def _steps_of(call: Collective, tag: int) -> Steps[None]:
    """Call ``call.steps`` only when the ranks have compared the call: it may change what a codec keeps."""
    assert call.steps is not None
    yield from call.steps(tag)
