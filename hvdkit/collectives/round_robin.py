"""Round-robin allreduce: reduce-scatter and allgather by pairs, each round of them a round of a tournament.

Two-phase allreduce (Patarasuk and Yuan, 2009, for its bound) under the schedule of the circle method (Kirkman, 1847;
for pairwise exchanges, Thakur, Rabenseifner and Gropp, 2005): in each of P - 1 rounds (P if P is odd, where each rank
sits out one) every rank exchanges chunks with one other only, so that no rank and no link between two is shared. Each
rank sends 2 n (P - 1) / P bytes, the least possible, in 2 (P - 1) or 2 P rounds.

Chunks are reduced when all have come, in rank order: sums have the bits that one process gives; half precision is
summed in fp32 and rounded once.
"""

from __future__ import annotations

from hvdkit.collectives.chunks import chunks_of, decode_final, room_for_payloads
from hvdkit.collectives.group import Array, Group, Steps
from hvdkit.collectives.scratch import SCRATCH
from hvdkit.compression import Cast
from hvdkit.kernels import ReduceOp, Scale


def opponents(rank: int, size: int) -> list[int | None]:
    """Whom ``rank`` meets in each round, or None where it sits out.

    The last seat stays, the others turn by one each round; with an odd ``size`` that seat is empty.
    """
    turning = size - 1 + size % 2
    met: list[int | None] = []
    for turn in range(turning):
        other = turn if rank == turning else (2 * turn - rank) % turning
        if other == rank:
            other = turning
        met.append(other if other < size else None)
    return met


def bytes_sent(rank: int, size: int, nbytes: int) -> int:
    """What ``rank`` sends if the payload has ``nbytes`` bytes and chunks are equal; else only all ranks' sum holds."""
    return 2 * nbytes * (size - 1) // size


def round_robin_allreduce(
    group: Group, buffer: Array, op: ReduceOp, scale: Scale, codec: Cast, tag: int
) -> Steps[None]:
    """Replace ``buffer`` (flat) by its reduction over all ranks. Uses ``tag`` and ``tag + 1``."""
    rounds = [peer for peer in opponents(group.rank, group.size) if peer is not None]
    chunks = chunks_of(buffer, group.size)
    encoded = [codec.encode(chunk) for chunk in chunks]
    scratch, payloads = room_for_payloads(group, encoded[group.rank])
    for peer in rounds:
        yield group.sendrecv(encoded[peer], peer, payloads[peer], peer, tag)
    own = chunks[group.rank]
    codec.decode_reduce(payloads, own, op, scale)
    SCRATCH.give_back(scratch)
    encoded[group.rank] = codec.encode(own)
    for peer in rounds:
        yield group.sendrecv(encoded[group.rank], peer, encoded[peer], peer, tag + 1)
    decode_final(codec, encoded, chunks)
