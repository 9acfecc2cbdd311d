"""Broadcast, allgather, alltoall and reduce-scatter, and the parts that allreduce algorithms share."""

from __future__ import annotations

from collections.abc import Sequence

from hvdkit import kernels
from hvdkit.collectives.group import Array, Group, Runs, Steps, is_same, partition
from hvdkit.collectives.scratch import SCRATCH
from hvdkit.compression import Cast
from hvdkit.kernels import ONE, ReduceOp, Scale
from hvdkit.transports.base import Bytes

# The peers of each round of an exchange; None: all peers at once.
Rounds = Sequence[Sequence[int]] | None

SCATTER_BYTES = 512 * 1024  # from this size on a broadcast is a scatter and an allgather


def chunks_of(buffer: Array, parts: int) -> list[Array]:
    """Return views of ``buffer`` (flat), cut on cache lines; late ones may be empty."""
    return [buffer[start:stop] for start, stop in partition(buffer.size, parts, buffer.itemsize)]


def room_for_payloads(group: Group, own: Array) -> tuple[Bytes, list[Array]]:
    """Return scratch memory, for the caller to give back, and a payload for each rank: ``own``, the others' in it."""
    scratch = SCRATCH.take(own.nbytes * (group.size - 1))
    payloads = [own] * group.size
    for index, peer in enumerate(group.peers):
        payloads[peer] = scratch[index * own.nbytes : (index + 1) * own.nbytes].view(own.dtype)
    return scratch, payloads


def encode_all(codec: Cast, chunks: Sequence[Array]) -> tuple[Bytes, list[Array]]:
    """Return scratch memory, for the caller to give back, and each chunk's payload, in it unless it is the chunk."""
    scratch = SCRATCH.take(sum(codec.room_bytes(chunk) for chunk in chunks))
    payloads, begin = [], 0
    for chunk in chunks:
        end = begin + codec.room_bytes(chunk)
        payloads.append(codec.encode(chunk, scratch[begin:end]))
        begin = end
    return scratch, payloads


def decode_final(codec: Cast, payloads: Sequence[Array], chunks: Sequence[Array]) -> None:
    """Fill each chunk from the payload that its owner encoded, on the owner too: so all ranks hold the same bits."""
    if codec.lossy:  # else payloads are the chunks themselves
        for payload, chunk in zip(payloads, chunks, strict=True):
            codec.decode_reduce([payload], chunk, ReduceOp.SUM, ONE)


def scale_in_place(buffer: Array, scale: Scale) -> None:
    """Multiply ``buffer`` by ``scale``, unless that is ONE."""
    if scale != ONE:
        kernels.scale_into(buffer, buffer, scale)


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


def reduce_scatter(
    group: Group, source: Array, bounds: Runs, own: Array, op: ReduceOp, scale: Scale, tag: int
) -> Steps[None]:
    """Replace ``own`` by this rank's part of the reduction of ``source`` (flat), in rank order.

    ``source`` stays as it is, unless ``own`` lies in it. Sends n (P - 1) / P bytes a rank.
    """
    chunks = [source[start:stop] for start, stop in bounds]
    if is_same(own, chunks[group.rank]):
        chunks[group.rank] = own
    scratch, parts = room_for_payloads(group, own)
    yield from alltoall(group, chunks, parts, tag)
    if group.size > 1:
        kernels.reduce_into(own, parts, op, scale)
    else:
        scale_in_place(own, scale)
    SCRATCH.give_back(scratch)


def broadcast(group: Group, buffer: Array, root: int, tag: int) -> Steps[None]:
    """Replace ``buffer`` (flat) on every rank by the root's. Uses ``tag`` and ``tag + 1``.

    Through the busiest rank go n log2 P bytes along a tree, or 2 n (P - 1) / P by scatter and allgather (van de Geijn;
    Barnett et al., 1994).
    """
    if group.size == 1 or buffer.size == 0:
        return
    if group.size > 2 and buffer.nbytes >= SCATTER_BYTES:
        yield from scatter_allgather_broadcast(group, buffer, root, tag)
    else:
        yield from tree_broadcast(group, buffer, root, tag)


def tree_broadcast(group: Group, buffer: Array, root: int, tag: int) -> Steps[None]:
    """Broadcast along a binomial tree: in round k, the 2**k ranks that have the data send it to the next 2**k."""
    virtual_rank = (group.rank - root) % group.size
    reach = 1 << (group.size - 1).bit_length()  # the least power of two that is no less than the size
    transfers = []
    while reach > 1:
        half = reach // 2
        if virtual_rank % reach == half:
            yield [group.irecv(buffer, (group.rank - half) % group.size, tag)]
        elif virtual_rank % reach == 0 and virtual_rank + half < group.size:
            transfers.append(group.isend(buffer, (group.rank + half) % group.size, tag))
        reach = half
    yield transfers


def scatter_allgather_broadcast(group: Group, buffer: Array, root: int, tag: int) -> Steps[None]:
    """Send every rank one chunk from the root, then let all ranks gather the chunks from each other."""
    chunks = chunks_of(buffer, group.size)
    own = chunks[group.rank]
    if group.rank == root:
        yield [group.isend(chunks[peer], peer, tag) for peer in group.peers if chunks[peer].size]
    elif own.size:
        yield [group.irecv(own, root, tag)]
    yield from allgather(group, own, chunks, tag + 1)
