"""Allgather, alltoall and reduce-scatter: every rank sends each other rank its part, all at once."""

from __future__ import annotations

from collections.abc import Sequence

from hvdkit.collectives.chunks import room_for_payloads, scale_in_place
from hvdkit.collectives.group import Array, Group, Runs, Steps
from hvdkit.collectives.scratch import SCRATCH
from hvdkit.compression import CASTS, Cast
from hvdkit.kernels import ReduceOp, Scale

# Whom a rank exchanges parts with, one round after the other; None: with everyone at once.
Rounds = Sequence[Sequence[int]] | None


def allgather(group: Group, own: Array, segments: Sequence[Array], tag: int) -> Steps[None]:
    """Fill ``segments[p]`` with rank p's ``own`` (flat, of the segment's length). Sends n (P - 1) bytes a rank."""
    return alltoall(group, [own] * group.size, segments, tag)


def alltoall(
    group: Group, outgoing: Sequence[Array], incoming: Sequence[Array], tag: int, rounds: Rounds = None
) -> Steps[None]:
    """Fill ``incoming[p]`` with rank p's ``outgoing`` part for this rank. Empty parts send nothing."""
    if incoming[group.rank] is not outgoing[group.rank]:
        incoming[group.rank][...] = outgoing[group.rank]
    for peers in rounds or [group.peers]:
        transfers = []
        for peer in peers:
            transfers += group.sendrecv(outgoing[peer], peer, incoming[peer], peer, tag)
        yield transfers


def exchange_and_reduce(
    group: Group,
    encoded: Sequence[Array],
    own: Array,
    op: ReduceOp,
    scale: Scale,
    codec: Cast,
    tag: int,
    rounds: Rounds = None,
) -> Steps[Array]:
    """Send payload p to rank p; returns the payload of what all ranks sent for this one, reduced.

    ``own`` is the chunk that this rank's was the payload of; it may hold anything afterwards.
    """
    scratch, payloads = room_for_payloads(group, encoded[group.rank])
    yield from alltoall(group, encoded, payloads, tag, rounds)
    result = codec.reduce_encoded(payloads, encoded[group.rank], own, op, scale)
    SCRATCH.give_back(scratch)
    return result


def reduce_scatter(group: Group, buffer: Array, bounds: Runs, op: ReduceOp, scale: Scale, tag: int) -> Steps[Array]:
    """Reduce ``buffer`` (flat) in rank order; returns this rank's run of it. Sends n (P - 1) / P bytes a rank."""
    chunks = [buffer[start:stop] for start, stop in bounds]
    own = chunks[group.rank]
    if group.size > 1:
        yield from exchange_and_reduce(group, chunks, own, op, scale, CASTS["none"], tag)
    else:
        scale_in_place(own, scale)
    return own
