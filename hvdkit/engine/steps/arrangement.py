"""How a plan lies in memory and travels: its buckets, their pieces and the order of these, as one pure decision.

What it is made of is first observed by rank 0, and told to all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np

from hvdkit.collectives.allreduce import allreduce
from hvdkit.collectives.group import AUTO, Group, Steps
from hvdkit.compression import CASTS, Codec
from hvdkit.engine.steps.plan import Bucket, Slot, first_order, lay_out, observed_order
from hvdkit.engine.steps.schedule import ENCODED_BUCKET, MEBIBYTE, Network, Piece, Sizes, cut, send_order
from hvdkit.kernels import ONE, ReduceOp

# When a slot was ready, where nobody saw it.
UNSEEN = -1.0


class Observation:
    """In the first step of a lane, of ``count`` slots: when rank 0 saw them become ready, and that all ranks learn it.

    ``ready_at``: when each was ready on rank 0, in seconds, or UNSEEN; ``overlaps_forward``: what its plan says. Both
    are the same on all ranks; before the exchange, and where rank 0 has joined, UNSEEN and False.
    """

    def __init__(self, group: Group, count: int, overlaps_forward: bool) -> None:
        self.ready_at = [UNSEEN] * count
        self.overlaps_forward = False
        self._group = group
        self._seen: dict[int, float] = {}  # here, in seconds
        self._overlaps_here = overlaps_forward

    def sees(self, slot: int, since: float | None) -> None:
        """A slot is ready since then (perf_counter), or since just now; UNSEEN where nobody saw that."""
        if since != UNSEEN:
            self._seen[slot] = perf_counter() if since is None else since

    def exchange(self, tag: int, joined: bool) -> Steps[None]:
        """Tell and hear, in microseconds since the first slot. Uses ``tag`` and ``tag + 1``."""
        message = np.full(len(self.ready_at) + 1, -1, dtype=np.int64)
        if self._group.rank == 0 and not joined:
            first = min(self._seen.values(), default=0.0)
            for slot, at in self._seen.items():
                message[slot] = int((at - first) * 1e6)
            message[-1] = self._overlaps_here
        yield from allreduce(self._group, message, ReduceOp.MAX, ONE, CASTS["none"], tag, AUTO)
        *ready_at, overlaps = message.tolist()
        self.ready_at = [UNSEEN if microseconds < 0 else microseconds * 1e-6 for microseconds in ready_at]
        self.overlaps_forward = overlaps > 0


@dataclass(frozen=True)
class Arrangement:
    """``pieces`` stand in the order in which they travel, each with its reason; ``nbytes`` is the size of each."""

    buckets: list[Bucket]
    pieces: list[Piece]
    reasons: list[str]
    nbytes: list[int]
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
    overlaps_forward: bool = False,
) -> Arrangement:
    """The arrangement for slots that are ready at these times (seconds, or UNSEEN).

    The same on all ranks, since all arguments are. ``sent_share``: the part of a piece that a rank sends, in each of
    two phases. ``cuts``: whether large tensors are cut. ``codecs``: the plan's; what lossy ones encode
    lies together in the order of registration, whenever it is ready. ``overlaps_forward``: as rank 0's plan says.
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
    on_the_wire = [_on_the_wire(codecs[bucket.codec], bucket.dtype, overlaps_forward) for bucket in buckets]
    sent = [int(size * on_the_wire[piece.bucket] * sent_share) for piece, size in zip(pieces, nbytes, strict=True)]
    needed = [min(bucket.slots) for bucket in buckets]
    turns, reasons = send_order(pieces, _ready(buckets, ready_at, seen), needed, sent, network)
    return Arrangement(
        buckets,
        [pieces[turn] for turn in turns],
        reasons,
        [nbytes[turn] for turn in turns],
        {slot: index for index, bucket in enumerate(buckets) for slot in bucket.slots},
    )


def _on_the_wire(codec: Codec, dtype: np.dtype[Any], overlaps_forward: bool) -> float:
    """What ``send_order`` takes a bucket for, in multiples of what one phase would take uncompressed.

    What payloads take is not known before: more than they do, for the time of encoding.
    """
    if codec.encodes:
        return 1.0
    return codec.wire_itemsize(dtype) / dtype.itemsize * (2 if overlaps_forward else 1)


def load(nbytes: int, dtype: np.dtype[Any], codec: Codec, sizes: Sizes) -> int:
    """As how many bytes in flight a piece of ``nbytes`` bytes counts.

    As those on the wire; what is made smaller than that, as a bucket, since little is on the wire of many of them.
    """
    if codec.encodes:
        return min(nbytes, max(sizes.bucket, MEBIBYTE))
    return nbytes * codec.wire_itemsize(dtype) // dtype.itemsize


def _ready(buckets: Sequence[Bucket], ready_at: Sequence[float], seen: Sequence[tuple[float, int]]) -> list[float]:
    """When each bucket is complete. Slots that nobody saw come with the last one; with none seen, all in order."""
    if not seen:
        return [float(index) for index in range(len(buckets))]
    last = seen[-1][0]
    return [max(last if ready_at[slot] == UNSEEN else ready_at[slot] for slot in bucket.slots) for bucket in buckets]
