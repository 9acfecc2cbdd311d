"""Allreduce algorithms in place, each for two ranks or more.

n is the bytes of a tensor's payload, P the number of ranks. Unless a docstring says otherwise, each rank sends
2 n (P - 1) / P bytes, the least possible (Patarasuk and Yuan, 2009, "Bandwidth optimal all-reduce algorithms for
clusters of workstations"). All but ``adasum`` use ``tag`` and ``tag + 1``.

``all_to_all``, ``two_phase``, ``round_robin`` and ``master_worker`` sum in rank order, give the bits that one process
gives, and round half precision once. ``ring``, ``tree`` and ``butterfly`` give other bits, the same on all ranks and in
every run; they round partial sums to the type that travels at each hop.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hvdkit import kernels
from hvdkit.collectives.exchange import (
    Rounds,
    alltoall,
    chunks_of,
    decode_final,
    encode_all,
    room_for_payloads,
    scale_in_place,
    tree_broadcast,
)
from hvdkit.collectives.group import Array, Group, Steps, partition
from hvdkit.collectives.scratch import SCRATCH
from hvdkit.compression import Cast
from hvdkit.kernels import ONE, ReduceOp, Scale

MASTER = 0


def all_to_all_allreduce(group: Group, buffer: Array, op: ReduceOp, scale: Scale, codec: Cast, tag: int) -> Steps[None]:
    """Send the whole tensor to all ranks, n (P - 1) bytes in the one exchange, and reduce the tensors in rank order."""
    if buffer.size == 0:
        return
    own = codec.encode(buffer)
    scratch, payloads = room_for_payloads(group, own)
    transfers = [group.irecv(payloads[peer], peer, tag) for peer in group.peers]
    transfers += [group.isend(own, peer, tag) for peer in group.peers]
    yield transfers
    codec.decode_reduce(payloads, buffer, op, scale)
    SCRATCH.give_back(scratch)
    # Every rank encodes the result, as the owner of a chunk does in the other algorithms, for the same bits.
    decode_final(codec, [codec.encode(buffer)], [buffer])


def two_phase_allreduce(
    group: Group, buffer: Array, op: ReduceOp, scale: Scale, codec: Cast, tag: int, rounds: Rounds = None
) -> Steps[None]:
    """Send chunk p to rank p, which reduces it in rank order and sends the result to all; in ``rounds`` if given."""
    chunks = chunks_of(buffer, group.size)
    scratch, encoded = encode_all(codec, chunks)
    room, payloads = room_for_payloads(group, encoded[group.rank])
    yield from alltoall(group, encoded, payloads, tag, rounds)
    own = codec.reduce_encoded(payloads, encoded[group.rank], chunks[group.rank], op, scale)
    SCRATCH.give_back(room)
    encoded[group.rank] = own
    yield from alltoall(group, [own] * group.size, encoded, tag + 1, rounds)
    decode_final(codec, encoded, chunks)
    SCRATCH.give_back(scratch)


class _Hops(NamedTuple):
    """Hops of partial sums from rank to rank."""

    group: Group
    op: ReduceOp
    scale: Scale
    codec: Cast
    tag: int

    def reduce(self, outgoing: Array, receiver: int, own: Array, sender: int, last: bool) -> Steps[None]:
        """Send ``outgoing``, and replace ``own`` by its reduction with the array of ``sender``; scaled in the last hop.

        The lower rank's operand comes first. Both are encoded. Empty arrays do not travel.
        """
        payload = self.codec.encode(own)
        scratch = SCRATCH.take(payload.nbytes)
        received = scratch[: payload.nbytes].view(payload.dtype)
        yield self.group.sendrecv(self.codec.encode(outgoing), receiver, received, sender, self.tag)
        parts = [received, payload] if sender < self.group.rank else [payload, received]
        self.codec.decode_reduce(parts, own, self.op, self.scale if last else ONE)
        SCRATCH.give_back(scratch)


def ring_allreduce(group: Group, buffer: Array, op: ReduceOp, scale: Scale, codec: Cast, tag: int) -> Steps[None]:
    """Send each chunk around the ring to be reduced, and once more as the result: 2 (P - 1) rounds over one link.

    Chunk c is summed in the order of ranks c + 1, c + 2, ..., c, in P - 1 hops.
    """
    chunks = chunks_of(buffer, group.size)
    left, right = (group.rank - 1) % group.size, (group.rank + 1) % group.size
    hops = _Hops(group, op, scale, codec, tag)
    for step in range(1, group.size):
        outgoing, own = chunks[(group.rank - step) % group.size], chunks[(group.rank - step - 1) % group.size]
        yield from hops.reduce(outgoing, right, own, left, last=step == group.size - 1)
    encoded = [codec.encode(chunk) for chunk in chunks]
    for step in range(group.size - 1):
        outgoing, incoming = encoded[(group.rank - step) % group.size], encoded[(group.rank - step - 1) % group.size]
        yield group.sendrecv(outgoing, right, incoming, left, tag + 1)
    decode_final(codec, encoded, chunks)


def children(rank: int, size: int) -> list[int]:
    """Return the ranks whose parent in the tree is ``rank``, nearest first."""
    distances = (1 << bit for bit in range(size.bit_length()))
    return [rank + d for d in distances if rank + d < size and not rank & (2 * d - 1)]


def tree_allreduce(group: Group, buffer: Array, op: ReduceOp, scale: Scale, codec: Cast, tag: int) -> Steps[None]:
    """Reduce to rank 0 along a binomial tree, and broadcast the result along the same tree: 2 log2 P rounds.

    The algorithm of MPICH's MPI_Reduce and MPI_Bcast for short messages (Thakur, Rabenseifner and Gropp, 2005,
    "Optimization of collective communication operations in MPICH"). Rank 0 sends n ceil(log2 P) bytes, another rank
    n (1 + its children). Rank r's parent is r without its lowest bit. The lower range of ranks comes first in a sum.
    """
    if buffer.size == 0:
        return
    hops = _Hops(group, op, scale, codec, tag)
    below = children(group.rank, group.size)
    for child in below:
        yield from hops.reduce(buffer[:0], child, buffer, child, last=group.rank == 0 and child == below[-1])
    payload = codec.encode(buffer)
    if group.rank != 0:
        yield [group.isend(payload, group.rank & (group.rank - 1), tag)]
    yield from tree_broadcast(group, payload, 0, tag + 1)
    decode_final(codec, [payload], [buffer])


def butterfly_allreduce(group: Group, buffer: Array, op: ReduceOp, scale: Scale, codec: Cast, tag: int) -> Steps[None]:
    """Reduce-scatter by recursive halving, allgather by recursive doubling: 2 log2 P rounds where P is a power of two.

    Rabenseifner (2004, "Optimization of collective reduction operations"). Partners are near in the first round of the
    halving, where most bytes travel. The lower range of ranks comes first in a sum. With a lossy codec the chunks of a
    round of the allgather travel one by one, as their owners encoded them.

    Otherwise let Q be the greatest power of two below P. Each of the P - Q extra ranks (0, 2, 4, ...) first sends its
    tensor to the rank after it, which stands for both and sends the result back at the end, in 2 log2 Q + 2 rounds. An
    extra rank sends n bytes, the rank after it 2 n (Q - 1) / Q + n, the rest 2 n (Q - 1) / Q.
    """
    if buffer.size == 0:
        return
    core = 1 << (group.size.bit_length() - 1)  # the greatest power of two that is no more than the size
    extras = group.size - core
    chunks = chunks_of(buffer, core)
    hops, everything = _Hops(group, op, scale, codec, tag), (0, core)
    paired = group.rank < 2 * extras
    if paired and group.rank % 2 == 0:
        yield [group.isend(codec.encode(buffer), group.rank + 1, tag)]
        encoded = [codec.encode(chunk) for chunk in chunks]
        yield [group.irecv(part, group.rank + 1, tag + 1) for part in _messages(buffer, encoded, everything, codec)]
    else:
        if paired:
            yield from hops.reduce(buffer[:0], group.rank - 1, buffer, group.rank - 1, last=False)
        virtual_rank = group.rank // 2 if paired else group.rank - extras
        ranks = [2 * other + 1 if other < extras else other + extras for other in range(core)]
        index = yield from _halve(hops, buffer, virtual_rank, ranks)
        encoded = [codec.encode(chunk) for chunk in chunks]
        yield from _double(hops, buffer, encoded, index, virtual_rank, ranks)
        if paired:
            yield [group.isend(part, group.rank - 1, tag + 1) for part in _messages(buffer, encoded, everything, codec)]
    decode_final(codec, encoded, chunks)


def _halve(hops: _Hops, buffer: Array, virtual_rank: int, ranks: Sequence[int]) -> Steps[int]:
    """Reduce-scatter among ``ranks``, of which this one has index ``virtual_rank``; return the chunk it reduced."""
    first, stop, distance = 0, len(ranks), 1
    while distance < len(ranks):  # this rank and a partner each reduce one half of the chunks that both hold
        partner = ranks[virtual_rank ^ distance]
        middle = (first + stop) // 2
        lower, upper = (first, middle), (middle, stop)
        (first, stop), sent = (upper, lower) if virtual_rank & distance else (lower, upper)
        distance *= 2
        own, outgoing = _part(buffer, (first, stop), len(ranks)), _part(buffer, sent, len(ranks))
        yield from hops.reduce(outgoing, partner, own, partner, last=distance == len(ranks))
    return first


def _double(
    hops: _Hops, buffer: Array, encoded: Sequence[Array], index: int, virtual_rank: int, ranks: Sequence[int]
) -> Steps[None]:
    """Allgather among ``ranks``, of which this one has chunk ``index``, with the partners of the halving reversed."""
    first, width = index, 1
    while width < len(ranks):
        partner = ranks[virtual_rank ^ (len(ranks) // 2 // width)]
        other = first ^ width
        outgoing = _messages(buffer, encoded, (first, first + width), hops.codec)
        incoming = _messages(buffer, encoded, (other, other + width), hops.codec)
        receives = [hops.group.irecv(part, partner, hops.tag + 1) for part in incoming]
        yield receives + [hops.group.isend(part, partner, hops.tag + 1) for part in outgoing]
        first, width = min(first, other), 2 * width


def _messages(buffer: Array, encoded: Sequence[Array], chunks: tuple[int, int], codec: Cast) -> list[Array]:
    """Return the arrays that carry reduced chunks: their part of the buffer, or of a lossy codec their payloads."""
    parts = encoded[slice(*chunks)] if codec.lossy else [_part(buffer, chunks, len(encoded))]
    return [part for part in parts if part.size]


def _part(buffer: Array, chunks: tuple[int, int], parts: int) -> Array:
    """Return the part of the buffer from the first of ``chunks`` to before the second, of ``parts`` chunks."""
    bounds = partition(buffer.size, parts, buffer.itemsize)
    return buffer[bounds[chunks[0]][0] : bounds[chunks[1] - 1][1]]


def round_robin_allreduce(
    group: Group, buffer: Array, op: ReduceOp, scale: Scale, codec: Cast, tag: int
) -> Steps[None]:
    """Reduce-scatter and allgather by pairs, each round of them a round of a tournament.

    Two-phase allreduce under the schedule of the circle method (Kirkman, 1847; for pairwise exchanges, Thakur,
    Rabenseifner and Gropp, 2005): in each of P - 1 rounds (P if P is odd, where each rank sits out one) every rank
    exchanges chunks with one other rank. Chunks are reduced when all have come.
    """
    # The last seat stays, the others turn by one each round; with an odd size that seat is empty.
    turning = group.size - 1 + group.size % 2
    seats = [turn if group.rank == turning else (2 * turn - group.rank) % turning for turn in range(turning)]
    opponents = [turning if seat == group.rank else seat for seat in seats]
    rounds = [[opponent] for opponent in opponents if opponent < group.size]
    return two_phase_allreduce(group, buffer, op, scale, codec, tag, rounds)


def master_worker_allreduce(
    group: Group, buffer: Array, op: ReduceOp, scale: Scale, codec: Cast, tag: int
) -> Steps[None]:
    """Send all tensors to rank 0, which reduces them and sends the result, in all n (P - 1) bytes, to all.

    The parameter server with one server (Li et al., 2014, "Scaling distributed machine learning with the parameter
    server"): two exchanges, but all of them through one link.
    """
    if buffer.size == 0:
        return
    payload = codec.encode(buffer)
    if group.rank == MASTER:
        scratch, payloads = room_for_payloads(group, payload)
        yield [group.irecv(payloads[worker], worker, tag) for worker in group.peers]
        codec.decode_reduce(payloads, buffer, op, scale)
        SCRATCH.give_back(scratch)
        payload = codec.encode(buffer)
        yield [group.isend(payload, worker, tag + 1) for worker in group.peers]
    else:
        yield [group.isend(payload, MASTER, tag)]
        yield [group.irecv(payload, MASTER, tag + 1)]
    decode_final(codec, [payload], [buffer])


def combine(lower: Array, higher: Array) -> Array:
    """Return (1 - l.h / 2 l.l) l + (1 - l.h / 2 h.h) h, computed in float64, in the dtype of the arguments.

    A vector of zeros leaves the other vector as it is. Two ranks compute it, each for itself, with the same bits.
    """
    with kernels.DefaultFloats():
        low, high = lower.astype(np.float64), higher.astype(np.float64)
        # Not by BLAS, whose order of additions depends on the settings of its threads.
        pairs = ((low, high), (low, low), (high, high))
        dot, low_square, high_square = (float(np.einsum("i,i->", *pair)) for pair in pairs)
        low_factor = 1.0 if low_square == 0.0 else 1.0 - dot / (2.0 * low_square)
        high_factor = 1.0 if high_square == 0.0 else 1.0 - dot / (2.0 * high_square)
        result: Array = (low_factor * low + high_factor * high).astype(lower.dtype)
    return result


def adasum(group: Group, buffer: Array, lengths: Sequence[int], scale: Scale, tag: int) -> Steps[None]:
    """Replace ``buffer`` (flat tensors of ``lengths`` elements, one after the other) by the ranks' Adasum.

    Adasum (Maleki et al., 2020) adds gradients where they are orthogonal, and averages them where they agree. Pairs
    combine, then pairs of pairs, each tensor by itself. The number of ranks must be a power of two. Sends n log2 P
    bytes a rank. Uses tags from ``tag`` to ``tag + 6``.
    """
    assert group.size & (group.size - 1) == 0
    scratch = SCRATCH.take(buffer.nbytes)
    other = scratch[: buffer.nbytes].view(buffer.dtype)
    for level in range(group.size.bit_length() - 1):
        peer = group.rank ^ (1 << level)
        yield [group.irecv(other, peer, tag + level % 7), group.isend(buffer, peer, tag + level % 7)]
        lower, higher = (buffer, other) if group.rank < peer else (other, buffer)
        for start, end in itertools.pairwise([0, *itertools.accumulate(lengths)]):
            buffer[start:end] = combine(lower[start:end], higher[start:end])
    SCRATCH.give_back(scratch)
    scale_in_place(buffer, scale)
