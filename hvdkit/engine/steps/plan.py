"""The request of an optimizer, and its arrangement: buckets, their pieces and the order of the pieces.

Pure functions of facts that ranks agree on, and of the times that rank 0 observes in the first step and sends to all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod
from time import perf_counter
from typing import Any

import numpy as np

from hvdkit.collectives.allreduce import allreduce
from hvdkit.collectives.group import AUTO, Group, Steps
from hvdkit.compression import CASTS, Codec
from hvdkit.engine.steps.schedule import ENCODED_BUCKET, MEBIBYTE, Network, Piece, Sizes, cut, send_order
from hvdkit.kernels import ONE, ReduceOp
from hvdkit.transports.base import CACHE_LINE


@dataclass(frozen=True)
class Slot:
    """A tensor of a plan."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    codec: int = 0  # which one of the plan's codecs

    @cached_property
    def elements(self) -> int:
        return prod(self.shape)

    @cached_property
    def nbytes(self) -> int:
        return self.elements * self.dtype.itemsize

    @cached_property
    def padded(self) -> int:
        """The elements up to the next cache line."""
        line = max(1, CACHE_LINE // self.dtype.itemsize)
        return -(-self.elements // line) * line


@dataclass(frozen=True)
class Reduction:
    """The operation, the factors and the codecs of a plan."""

    op: ReduceOp
    prescale: float
    postscale: float
    codecs: tuple[Codec, ...]  # slots say which one is theirs


@dataclass(frozen=True)
class Plan:
    """The request of an optimizer. ``device`` is the device on which its slots shall live, or registration.HOST."""

    name: str
    slots: Sequence[Slot]
    reduction: Reduction
    process_set_id: int = 0
    groups: Sequence[Sequence[int]] = ()
    device: str = "cpu"


@dataclass(frozen=True)
class Bucket:
    """Slots that travel together, all of one dtype and one codec, each beginning on a cache line."""

    dtype: np.dtype[Any]
    slots: tuple[int, ...]
    offsets: tuple[int, ...]  # in elements, one for each slot
    elements: int
    codec: int = 0

    @property
    def nbytes(self) -> int:
        return self.elements * self.dtype.itemsize


def lay_out(
    slots: Sequence[Slot],
    order: Sequence[int],
    threshold: int,
    groups: Sequence[Sequence[int]] = (),
    first_threshold: int | None = None,
    alone: int | None = None,
) -> list[Bucket]:
    """Return buckets of at most ``threshold`` bytes, as they become complete if slots become ready in ``order``.

    A larger slot has a bucket of its own, as has a slot of ``alone`` bytes or more that is in no group; the slots of a
    group share one bucket whatever its size. ``first_threshold`` is that of the first bucket. Slots that are not in
    ``order`` are left out.
    """
    buckets: list[Bucket] = []
    first = threshold if first_threshold is None else first_threshold
    filling: dict[tuple[np.dtype[Any], int], tuple[list[int], int]] = {}  # by dtype and codec: slots and bytes so far
    for unit in _units(order, groups):
        kinds: dict[tuple[np.dtype[Any], int], list[int]] = {}
        for slot in unit:
            kinds.setdefault((slots[slot].dtype, slots[slot].codec), []).append(slot)
        for kind, members in kinds.items():
            nbytes = sum(slots[slot].padded * slots[slot].dtype.itemsize for slot in members)
            if alone is not None and len(unit) == 1 and nbytes >= alone:
                buckets.append(_bucket(slots, members))
                continue
            held, held_bytes = filling.pop(kind, ([], 0))
            limit = threshold if buckets else first
            if held and held_bytes + nbytes > limit:
                buckets.append(_bucket(slots, held))
                held, held_bytes = [], 0
            held.extend(members)
            filling[kind] = held, held_bytes + nbytes
            if held_bytes + nbytes >= limit:
                buckets.append(_bucket(slots, filling.pop(kind)[0]))
    buckets += [_bucket(slots, held) for held, _ in filling.values()]
    position = {slot: index for index, slot in enumerate(order)}
    return sorted(buckets, key=lambda bucket: max(position[slot] for slot in bucket.slots))


def _units(order: Sequence[int], groups: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the slots that stay together, each unit at the place where its last slot becomes ready."""
    present = set(order)
    groups = [[slot for slot in group if slot in present] for group in groups]
    group_of = {slot: number for number, group in enumerate(groups) for slot in group}
    left = [len(group) for group in groups]
    units: list[list[int]] = []
    for slot in order:
        number = group_of.get(slot)
        if number is None:
            units.append([slot])
            continue
        left[number] -= 1
        if left[number] == 0:
            units.append(list(groups[number]))
    return units


def _bucket(slots: Sequence[Slot], members: Sequence[int]) -> Bucket:
    *offsets, end = accumulate((slots[slot].padded for slot in members), initial=0)
    first = slots[members[0]]
    elements = first.elements if len(members) == 1 else end
    return Bucket(first.dtype, tuple(members), tuple(offsets), elements, first.codec)


def first_order(count: int) -> list[int]:
    """Return the order before any was observed: the backward pass reaches the last registered tensor first."""
    return list(range(count - 1, -1, -1))


def observed_order(ready: Sequence[int], count: int) -> list[int]:
    """Return the order in which slots became ready; slots without a gradient in that step come last."""
    seen = set(ready)
    return [*ready, *(slot for slot in first_order(count) if slot not in seen)]


# When a slot was ready, where nobody saw it.
UNSEEN = -1.0


class Observation:
    """The times at which rank 0 saw the ``count`` slots of a lane become ready in the first step.

    ``ready_at``, in seconds, is the same on all ranks; UNSEEN before the exchange, and where rank 0 has joined.
    """

    def __init__(self, group: Group, count: int) -> None:
        self.ready_at = [UNSEEN] * count
        self._group = group
        self._seen: dict[int, float] = {}  # here, in seconds

    def sees(self, slot: int, since: float | None) -> None:
        """Note that a slot is ready since a time (perf_counter), None for now, UNSEEN if the time is unknown."""
        if since != UNSEEN:
            self._seen[slot] = perf_counter() if since is None else since

    def exchange(self, tag: int, joined: bool) -> Steps[None]:
        """Exchange the times, in microseconds since the first slot. Uses ``tag`` and ``tag + 1``."""
        message = np.full(len(self.ready_at), -1, dtype=np.int64)
        if self._group.rank == 0 and not joined:
            first = min(self._seen.values(), default=0.0)
            for slot, at in self._seen.items():
                message[slot] = int((at - first) * 1e6)
        yield from allreduce(self._group, message, ReduceOp.MAX, ONE, CASTS["none"], tag, AUTO)
        self.ready_at = [UNSEEN if microseconds < 0 else microseconds * 1e-6 for microseconds in message.tolist()]


@dataclass(frozen=True)
class Arrangement:
    """The buckets of a plan, and their pieces in the order in which they travel."""

    buckets: list[Bucket]
    pieces: list[Piece]
    reasons: list[str]  # by piece: the reason for its place in the order
    nbytes: list[int]  # by piece
    loads: list[int]  # by piece: the bytes in flight that it counts as
    slots_of: list[int]  # by bucket: how many slots it has
    bucket_of: dict[int, int]  # by slot


def arrange(
    slots: Sequence[Slot],
    ready_at: Sequence[float],
    groups: Sequence[Sequence[int]],
    sizes: Sizes,
    network: Network,
    sent_share: float,
    cuts: bool = True,
    codecs: Sequence[Codec] = (CASTS["none"],),
) -> Arrangement:
    """Return the arrangement for slots that are ready at these times (seconds, or UNSEEN).

    ``sent_share``: the part of a piece that a rank sends in each of two phases. ``cuts``: large tensors are cut.
    ``codecs``: the plan's; gradients for lossy codecs lie together in the order of registration.
    """
    encoded = [codec.encodes for codec in codecs]
    whole = [codec.whole_tensors for codec in codecs]
    seen = sorted((at, slot) for slot, at in enumerate(ready_at) if at != UNSEEN)
    order = observed_order([slot for _, slot in seen], len(slots))
    free = [slot for slot in order if not encoded[slots[slot].codec]]
    fixed = [slot for slot in first_order(len(slots)) if encoded[slots[slot].codec]]
    buckets = lay_out(slots, free, sizes.bucket, groups, sizes.first_bucket, sizes.alone)
    largest = [sizes.bucket] * len(buckets)
    buckets += lay_out(slots, fixed, sizes.encoded_bucket, groups, alone=sizes.alone)
    largest += [0 if whole[bucket.codec] else ENCODED_BUCKET for bucket in buckets[len(largest) :]]
    itemsizes = [bucket.dtype.itemsize for bucket in buckets]
    pieces = cut([bucket.elements for bucket in buckets], itemsizes, largest if cuts else [0] * len(buckets))
    nbytes = [(piece.end - piece.begin) * itemsizes[piece.bucket] for piece in pieces]
    # By bucket, in multiples of its bytes. Payload sizes are unknown in advance; 1.0 overestimates them to account for
    # encoding time.
    on_the_wire = [
        1.0 if encoded[bucket.codec] else codecs[bucket.codec].wire_itemsize(bucket.dtype) / bucket.dtype.itemsize
        for bucket in buckets
    ]
    sent = [int(size * on_the_wire[piece.bucket] * sent_share) for piece, size in zip(pieces, nbytes, strict=True)]
    needed = [min(bucket.slots) for bucket in buckets]
    turns, reasons = send_order(pieces, _complete_at(buckets, ready_at), needed, sent, network)
    pieces, nbytes = [pieces[turn] for turn in turns], [nbytes[turn] for turn in turns]
    loads = [
        load(size, buckets[piece.bucket].dtype, codecs[buckets[piece.bucket].codec], sizes)
        for piece, size in zip(pieces, nbytes, strict=True)
    ]
    slots_of = [len(bucket.slots) for bucket in buckets]
    bucket_of = {slot: index for index, bucket in enumerate(buckets) for slot in bucket.slots}
    return Arrangement(buckets, pieces, reasons, nbytes, loads, slots_of, bucket_of)


def load(nbytes: int, dtype: np.dtype[Any], codec: Codec, sizes: Sizes) -> int:
    """Return the bytes in flight that a piece counts as: those on the wire, encoded at most those of a bucket."""
    if codec.encodes:
        return min(nbytes, max(sizes.bucket, MEBIBYTE))
    return nbytes * codec.wire_itemsize(dtype) // dtype.itemsize


def _complete_at(buckets: Sequence[Bucket], ready_at: Sequence[float]) -> list[float]:
    """Return the time at which each bucket is complete. Unseen slots come with the last seen slot."""
    last = max(ready_at, default=UNSEEN)
    if last == UNSEEN:
        return [float(index) for index in range(len(buckets))]
    return [max(last if ready_at[slot] == UNSEEN else ready_at[slot] for slot in bucket.slots) for bucket in buckets]
