"""Allgather, alltoall and reduce-scatter, all at once, and the parts that allreduce algorithms share."""

from __future__ import annotations

from collections.abc import Sequence

from hvdkit import kernels
from hvdkit.collectives.group import Array, Group, Runs, Steps, partition
from hvdkit.collectives.scratch import SCRATCH
from hvdkit.compression import CASTS, Cast
from hvdkit.kernels import ONE, ReduceOp, Scale
from hvdkit.transports.base import Bytes

# The peers of each round of an exchange; None: all peers at once.
Rounds = Sequence[Sequence[int]] | None


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
    """Send payload p to rank p. Return the payload of the reduced chunk of this rank; ``own`` is overwritten."""
    scratch, payloads = room_for_payloads(group, encoded[group.rank])
    yield from alltoall(group, encoded, payloads, tag, rounds)
    result = codec.reduce_encoded(payloads, encoded[group.rank], own, op, scale)
    SCRATCH.give_back(scratch)
    return result


def reduce_scatter(group: Group, buffer: Array, bounds: Runs, op: ReduceOp, scale: Scale, tag: int) -> Steps[Array]:
    """Reduce ``buffer`` (flat) in rank order; return this rank's part of it. Sends n (P - 1) / P bytes a rank."""
    chunks = [buffer[start:stop] for start, stop in bounds]
    own = chunks[group.rank]
    if group.size > 1:
        yield from exchange_and_reduce(group, chunks, own, op, scale, CASTS["none"], tag)
    else:
        scale_in_place(own, scale)
    return own
