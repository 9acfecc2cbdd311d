"""Butterfly allreduce: reduce-scatter by recursive halving, allgather by recursive doubling.

Rabenseifner (2004, "Optimization of collective reduction operations"). With P a power of two: 2 log2 P rounds, and each
rank sends 2 n (P - 1) / P bytes, the least possible. Partners are near in the first round of the halving, where most
bytes travel.

Otherwise let Q be the greatest power of two below P. Each of the P - Q extra ranks (0, 2, 4, ...) first gives its
tensor to the rank after it, which stands for both, and is given the result at the end: an extra rank sends n bytes, the
one after it 2 n (Q - 1) / Q + n, the rest 2 n (Q - 1) / Q, in 2 log2 Q + 2 rounds.

Neighbouring runs of ranks are summed, the lower one first: the same bits on all ranks and in every run, but not those
of a sum in rank order. Half precision and encoded partial sums are rounded to the type that travels at each of the
log2 Q hops, and at the one from an extra rank.
"""

from __future__ import annotations

from collections.abc import Sequence

from hvdkit.collectives.chunks import chunks_of, decode_final, reduce_hop
from hvdkit.collectives.group import Array, Group, Steps, partition
from hvdkit.compression import Cast
from hvdkit.kernels import ONE, ReduceOp, Scale


def core_size(size: int) -> int:
    """The greatest power of two that is no more than ``size``."""
    return 1 << (size.bit_length() - 1)


def bytes_sent(rank: int, size: int, nbytes: int) -> int:
    """What ``rank`` sends if the payload has ``nbytes`` bytes and chunks are equal; else only all ranks' sum holds."""
    core = core_size(size)
    exchanged = 2 * nbytes * (core - 1) // core
    if rank >= 2 * (size - core):
        return exchanged
    return nbytes if rank % 2 == 0 else exchanged + nbytes


def butterfly_allreduce(group: Group, buffer: Array, op: ReduceOp, scale: Scale, codec: Cast, tag: int) -> Steps[None]:
    """Replace ``buffer`` (flat) by its reduction over all ranks. Uses ``tag`` and ``tag + 1``.

    With a lossy codec the chunks of a round of the allgather travel one by one, as their owners encoded them.
    """
    if buffer.size == 0:
        return
    core = core_size(group.size)
    extras = group.size - core
    chunks = chunks_of(buffer, core)
    nothing, everything = buffer[:0], (0, core)
    paired = group.rank < 2 * extras
    if paired and group.rank % 2 == 0:
        yield [group.isend(codec.encode(buffer), group.rank + 1, tag)]
        encoded = [codec.encode(chunk) for chunk in chunks]
        yield [group.irecv(part, group.rank + 1, tag + 1) for part in _messages(buffer, encoded, everything, codec)]
    else:
        if paired:
            yield from reduce_hop(group, nothing, group.rank - 1, buffer, group.rank - 1, op, ONE, codec, tag)
        place = group.rank // 2 if paired else group.rank - extras
        ranks = [2 * other + 1 if other < extras else other + extras for other in range(core)]
        index = yield from _halve(group, buffer, place, ranks, op, scale, codec, tag)
        encoded = [codec.encode(chunk) for chunk in chunks]
        yield from _double(group, buffer, encoded, index, place, ranks, codec, tag + 1)
        if paired:
            yield [group.isend(part, group.rank - 1, tag + 1) for part in _messages(buffer, encoded, everything, codec)]
    decode_final(codec, encoded, chunks)


def _halve(
    group: Group,
    buffer: Array,
    place: int,
    ranks: Sequence[int],
    op: ReduceOp,
    scale: Scale,
    codec: Cast,
    tag: int,
) -> Steps[int]:
    """Reduce-scatter among ``ranks``: with a partner, each reduces one half of what both hold; returns the last chunk.

    ``place`` is this rank's in ``ranks``.
    """
    first, stop = 0, len(ranks)
    distance = 1
    while distance < len(ranks):
        partner = ranks[place ^ distance]
        middle = (first + stop) // 2
        lower, upper = (first, middle), (middle, stop)
        (first, stop), given = (upper, lower) if place & distance else (lower, upper)
        distance *= 2
        factor = scale if distance == len(ranks) else ONE
        own, outgoing = _run(buffer, (first, stop), len(ranks)), _run(buffer, given, len(ranks))
        yield from reduce_hop(group, outgoing, partner, own, partner, op, factor, codec, tag)
    return first


def _double(
    group: Group,
    buffer: Array,
    encoded: Sequence[Array],
    index: int,
    place: int,
    ranks: Sequence[int],
    codec: Cast,
    tag: int,
) -> Steps[None]:
    """Allgather among ``ranks``, of which this one has chunk ``index``: the partners of the halving, last one first."""
    first, width = index, 1
    while width < len(ranks):
        partner = ranks[place ^ (len(ranks) // 2 // width)]
        other = first ^ width
        outgoing = _messages(buffer, encoded, (first, first + width), codec)
        incoming = _messages(buffer, encoded, (other, other + width), codec)
        yield [group.irecv(part, partner, tag) for part in incoming] + [
            group.isend(part, partner, tag) for part in outgoing
        ]
        first, width = min(first, other), 2 * width


def _messages(buffer: Array, encoded: Sequence[Array], chunks: tuple[int, int], codec: Cast) -> list[Array]:
    """What carries these reduced chunks: their run of the buffer if the codec loses nothing, else their payloads."""
    parts = encoded[slice(*chunks)] if codec.lossy else [_run(buffer, chunks, len(encoded))]
    return [part for part in parts if part.size]


def _run(buffer: Array, chunks: tuple[int, int], parts: int) -> Array:
    """Chunks from the first to before the second, of ``parts``, in one piece."""
    bounds = partition(buffer.size, parts, buffer.itemsize)
    return buffer[bounds[chunks[0]][0] : bounds[chunks[1] - 1][1]]
