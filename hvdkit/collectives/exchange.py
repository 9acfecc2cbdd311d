"""Allgather, alltoall and reduce-scatter: every rank sends each other rank its part, all at once."""

from __future__ import annotations

from collections.abc import Sequence

from hvdkit import kernels
from hvdkit.collectives.group import Array, Group, Steps
from hvdkit.collectives.two_phase import exchange_and_reduce
from hvdkit.compression import CASTS
from hvdkit.kernels import ONE, ReduceOp, Scale


def allgather(group: Group, own: Array, segments: Sequence[Array], tag: int) -> Steps[None]:
    """Fill ``segments[p]`` with rank p's ``own`` (flat, of the segment's length). Sends n (P - 1) bytes a rank."""
    if segments[group.rank] is not own:
        segments[group.rank][...] = own
    transfers = []
    for peer in group.peers():
        if segments[peer].size:
            transfers.append(group.irecv(segments[peer], peer, tag))
        if own.size:
            transfers.append(group.isend(own, peer, tag))
    yield transfers


def alltoall(group: Group, outgoing: Sequence[Array], incoming: Sequence[Array], tag: int) -> Steps[None]:
    """Fill ``incoming[p]`` with rank p's ``outgoing`` part for this rank. Empty parts send nothing."""
    incoming[group.rank][...] = outgoing[group.rank]
    transfers = []
    for peer in group.peers():
        if incoming[peer].size:
            transfers.append(group.irecv(incoming[peer], peer, tag))
        if outgoing[peer].size:
            transfers.append(group.isend(outgoing[peer], peer, tag))
    yield transfers


def reduce_scatter(
    group: Group, buffer: Array, bounds: Sequence[tuple[int, int]], op: ReduceOp, scale: Scale, tag: int
) -> Steps[Array]:
    """Reduce ``buffer`` (flat) in rank order; returns this rank's run of it. Sends n (P - 1) / P bytes a rank."""
    chunks = [buffer[start:stop] for start, stop in bounds]
    own = chunks[group.rank]
    if group.size > 1:
        yield from exchange_and_reduce(group, chunks, own, op, scale, CASTS["none"], tag)
    elif scale != ONE:
        kernels.scale_into(own, own, scale)
    return own
