"""The arrangement of a plan: its buckets, their pieces and the order of the pieces, as one pure decision.

It depends on times that rank 0 observes in the first step and sends to all ranks.
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
    """The times at which rank 0 saw the ``count`` slots of a lane become ready in the first step, sent to all ranks.

    ``ready_at``: when each slot was ready on rank 0, in seconds, the same on all ranks; UNSEEN before the exchange, and
    where rank 0 has joined.
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
) -> Arrangement:
    """Return the arrangement for slots that are ready at these times (seconds, or UNSEEN).

    It is the same on all ranks, since all arguments are. ``sent_share``: the part of a piece that a rank sends in each
    of two phases. ``cuts``: large tensors are cut. ``codecs``: the plan's codecs; gradients for lossy codecs lie
    together in the order of registration, whenever they are ready.
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
    on_the_wire = [_on_the_wire(codecs[bucket.codec], bucket.dtype) for bucket in buckets]
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


def _on_the_wire(codec: Codec, dtype: np.dtype[Any]) -> float:
    """Return the bytes of a bucket on the wire in multiples of its uncompressed bytes, as ``send_order`` takes them.

    Payload sizes are unknown in advance; 1.0 overestimates them to account for encoding time.
    """
    return 1.0 if codec.encodes else codec.wire_itemsize(dtype) / dtype.itemsize


def load(nbytes: int, dtype: np.dtype[Any], codec: Codec, sizes: Sizes) -> int:
    """Return the bytes in flight that a piece of ``nbytes`` bytes counts as.

    These are its bytes on the wire. An encoded piece counts as at most a bucket, because few of its bytes travel.
    """
    if codec.encodes:
        return min(nbytes, max(sizes.bucket, MEBIBYTE))
    return nbytes * codec.wire_itemsize(dtype) // dtype.itemsize


def _ready(buckets: Sequence[Bucket], ready_at: Sequence[float], seen: Sequence[tuple[float, int]]) -> list[float]:
    """Return the time at which each bucket is complete. Unseen slots come with the last seen slot."""
    if not seen:
        return [float(index) for index in range(len(buckets))]
    last = seen[-1][0]
    return [max(last if ready_at[slot] == UNSEEN else ready_at[slot] for slot in bucket.slots) for bucket in buckets]
