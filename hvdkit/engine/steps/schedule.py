"""The sizes and the order of buckets: pure functions of facts that all ranks know, each with the reason for its answer.

Sizes follow the alpha-beta model (Hockney, 1994): a message of n bytes takes ``latency + n * seconds_per_byte``, both
measured at init between two ranks, of different nodes if there are several. The first bucket is small. Where ranks
share no memory, a tensor of 1 MiB or more has a bucket of its own, and travels from where it lies.

Of the pieces that are ready, the piece that the next forward pass needs first travels first. The order is computed
once, from what rank 0 observed: ranks that chose by themselves would wait for each other.

A sum beside the backward pass needs a core. Where the ranks of a lane share one node's memory and their threads have
every core of every node (``Topology.is_full``), buckets have 128 MiB (``without_overlap``), and are summed after the
backward pass. A size that was asked for is used.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush

MEBIBYTE = 1024 * 1024

# What the engine itself takes for one operation.
OPERATION_SECONDS = 100e-6
# A bucket is large enough when latency is this part of the time it takes.
LATENCY_SHARE = 0.05
SMALLEST_BUCKET, LARGEST_BUCKET = MEBIBYTE, 8 * MEBIBYTE
# The first bucket of a step is this part of the others: the wire should not wait long for its first work.
FIRST_BUCKET_PART = 8
# What is on its way at once, in buckets: one is exchanged, one summed, one sent back, one waits.
BUCKETS_IN_FLIGHT = 4
MOST_BUCKETS_IN_FLIGHT = 16
# Buckets that payload codecs encode, and their pieces, have a size of their own. What was measured must not decide it:
# thresholds, blocks and residuals depend on what is encoded together, and the same run shall give the same bits.
ENCODED_BUCKET = 8 * MEBIBYTE
# A tensor of this size costs as much if it is copied into a bucket and back as an operation of its own does.
WORTH_AN_OPERATION = MEBIBYTE
# Where the computation has every core, a few large buckets, summed after a backward pass, cost less. Larger ones would
# keep the engine from all else.
BUCKET_AT_THE_END = 128 * MEBIBYTE

# For a device's own collectives: the sizes of DistributedDataParallel's buckets, chosen for NCCL (Li et al., 2020).
DEVICE_BUCKET = 25 * MEBIBYTE


@dataclass(frozen=True)
class Network:
    """The latency and speed between two ranks, of different nodes if there are any, as measured at init."""

    latency_seconds: float
    seconds_per_byte: float

    def summary(self) -> str:
        return f"{self.latency_seconds * 1e6:.0f} us, {1e-9 / max(self.seconds_per_byte, 1e-15):.2f} GB/s"


@dataclass(frozen=True)
class Sizes:
    """The sizes of buckets and pieces in bytes, and the reason for them.

    ``alone``: tensors of this size have a bucket of their own; None where the size of buckets was asked for.
    """

    bucket: int
    first_bucket: int
    in_flight: int
    reason: str
    encoded_bucket: int = ENCODED_BUCKET
    alone: int | None = None


def choose_sizes(
    network: Network, asked_bucket: int | None, asked_in_flight: int | None, worthwhile_bytes: int = 0
) -> Sizes:
    """Return the bytes of a bucket, of the first bucket, and of all buckets in flight.

    ``asked_bucket`` (HVDKIT_FUSION_THRESHOLD) and ``asked_in_flight`` (HVDKIT_MAX_BYTES_IN_FLIGHT) win where given.
    ``worthwhile_bytes``: what buckets, but for the first, should have at least, by the transport.
    """
    if asked_bucket is not None:
        bucket, first, reason = asked_bucket, asked_bucket, "HVDKIT_FUSION_THRESHOLD"
    else:
        latency = network.latency_seconds + OPERATION_SECONDS
        enough = latency / LATENCY_SHARE / max(network.seconds_per_byte, 1e-15)
        smallest = max(worthwhile_bytes, SMALLEST_BUCKET)
        bucket = int(min(max(enough, smallest), max(smallest, LARGEST_BUCKET)))
        first = max(bucket // FIRST_BUCKET_PART, SMALLEST_BUCKET // FIRST_BUCKET_PART)
        reason = f"latency is {LATENCY_SHARE:.0%} of {enough / MEBIBYTE:.1f} MiB at {network.summary()}"
        if bucket == worthwhile_bytes:
            reason = f"what an operation costs the transport is worth {bucket / MEBIBYTE:.0f} MiB"
    encoded = ENCODED_BUCKET if asked_bucket is None else asked_bucket
    alone = max(worthwhile_bytes, WORTH_AN_OPERATION) if asked_bucket is None else None
    if asked_in_flight is not None:
        return Sizes(bucket, first, asked_in_flight, f"{reason}; HVDKIT_MAX_BYTES_IN_FLIGHT", encoded, alone)
    # What one trip takes must be on its way, or the wire waits for answers.
    trip = int(2 * network.latency_seconds / max(network.seconds_per_byte, 1e-15))
    least, most = (count * max(bucket, SMALLEST_BUCKET) for count in (BUCKETS_IN_FLIGHT, MOST_BUCKETS_IN_FLIGHT))
    in_flight = min(max(least, trip), most)
    return Sizes(bucket, first, in_flight, f"{reason}; {in_flight / MEBIBYTE:.0f} MiB in flight", encoded, alone)


def for_a_device(sizes: Sizes) -> Sizes:
    """Return sizes for gradients that a device's library sums, unless a size was asked for."""
    if sizes.alone is None or sizes.bucket >= DEVICE_BUCKET:
        return replace(sizes, alone=None)
    in_flight, reason = BUCKETS_IN_FLIGHT * DEVICE_BUCKET, f"{DEVICE_BUCKET // MEBIBYTE} MiB, as on any device"
    return replace(sizes, bucket=DEVICE_BUCKET, first_bucket=MEBIBYTE, in_flight=in_flight, reason=reason, alone=None)


def without_overlap(sizes: Sizes) -> Sizes:
    """Return sizes for gradients that ranks sum in shared memory while their computation has every core."""
    bucket = max(sizes.bucket, BUCKET_AT_THE_END)
    reason = f"the computation has every core, so {bucket / MEBIBYTE:.0f} MiB are summed at once at its end"
    return replace(sizes, bucket=bucket, first_bucket=bucket, reason=reason, alone=None)


@dataclass(frozen=True)
class Piece:
    """A run of a bucket's elements that travels as one operation."""

    bucket: int
    begin: int
    end: int
    part: int  # of ``parts``
    parts: int


def cut(elements: Sequence[int], itemsizes: Sequence[int], largest: Sequence[int]) -> list[Piece]:
    """Return the pieces of buckets of so many elements, in order: parts of about ``largest`` bytes, on cache lines.

    Only a bucket of more than twice as much is cut, which is one with a large tensor. ``largest`` 0 cuts nothing. All
    arguments are by bucket.
    """
    pieces = []
    for bucket, (count, itemsize, most) in enumerate(zip(elements, itemsizes, largest, strict=True)):
        parts = -(-count * itemsize // most) if 0 < 2 * most < count * itemsize else 1
        line = max(1, 64 // itemsize)
        each = -(-count // parts // line) * line if parts > 1 else count
        begins = range(0, count, each) if count else range(1)
        for part, begin in enumerate(begins):
            pieces.append(Piece(bucket, begin, min(count, begin + each), part, len(begins)))
    return pieces


def send_order(
    pieces: Sequence[Piece], ready_at: Sequence[float], needed: Sequence[int], nbytes: Sequence[int], network: Network
) -> tuple[list[int], list[str]]:
    """Return the order in which pieces travel, and the reason for the place of each.

    ``ready_at`` (seconds) and ``needed`` (smaller: the next forward pass wants it sooner) are by bucket. ``nbytes``, by
    piece, is what a rank sends in one of two phases, as if the wire were twice as quick: a piece that is ordered before
    it is ready keeps the wire idle, while a piece that comes a little later costs nothing.

    The order is that of a wire that always takes the most urgent piece that is ready; where the wire keeps up with the
    backward pass that is the order of readiness.
    """
    waiting = deque(sorted(range(len(pieces)), key=lambda index: (ready_at[pieces[index].bucket], index)))
    order: list[int] = []
    reasons: list[str] = []
    now = 0.0
    urgent: list[tuple[int, int, int, int]] = []  # a heap; of two as urgent, the one that was ready before
    ready: list[int] = []  # the same pieces, in order
    while waiting or ready:
        if not ready:
            now = max(now, ready_at[pieces[waiting[0]].bucket])
        while waiting and ready_at[pieces[waiting[0]].bucket] <= now:
            index = waiting.popleft()
            heappush(urgent, (needed[pieces[index].bucket], pieces[index].begin, -len(waiting), index))
            insort(ready, index)
        chosen = heappop(urgent)[-1]
        if overtaken := bisect_left(ready, chosen):
            reasons.append(f"needed sooner than {overtaken} that were ready before")
        else:
            reasons.append("ready first" if len(ready) == 1 else f"needed soonest of {len(ready)}")
        del ready[overtaken]
        order.append(chosen)
        now += OPERATION_SECONDS + nbytes[chosen] * network.seconds_per_byte
    return order, reasons
