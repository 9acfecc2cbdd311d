"""Two-phase allreduce: chunk p of everyone goes to rank p, which reduces it in rank order and hands it to all.

A direct reduce-scatter and a direct allgather: two exchanges, and each rank sends 2 n (P - 1) / P bytes, the lower
bound of Patarasuk and Yuan (2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations"). It is where
a codec fits: what travels is encoded. Sums have the bits that one process gives; half precision is summed in fp32 and
rounded once.
"""

from __future__ import annotations

from hvdkit.collectives.chunks import chunks_of, decode_final, room_for_payloads
from hvdkit.collectives.group import Array, Group, Steps
from hvdkit.collectives.scratch import SCRATCH
from hvdkit.compression import Cast
from hvdkit.kernels import ReduceOp, Scale


def two_phase_allreduce(group: Group, buffer: Array, op: ReduceOp, scale: Scale, codec: Cast, tag: int) -> Steps[None]:
    """Replace ``buffer`` (flat) by its reduction over all ranks. Uses ``tag`` and ``tag + 1``."""
    chunks = chunks_of(buffer, group.size)
    encoded = [codec.encode(chunk) for chunk in chunks]
    own = yield from exchange_and_reduce(group, encoded, chunks[group.rank], op, scale, codec, tag)
    encoded[group.rank] = own
    transfers = []
    for peer in group.peers():
        transfers += group.sendrecv(own, peer, encoded[peer], peer, tag + 1)
    yield transfers
    decode_final(codec, encoded, chunks)


def exchange_and_reduce(
    group: Group, encoded: list[Array], own: Array, op: ReduceOp, scale: Scale, codec: Cast, tag: int
) -> Steps[Array]:
    """First phase: send chunk p to rank p, reduce what came for this rank into ``own``; returns it encoded again."""
    scratch, payloads = room_for_payloads(group, encoded[group.rank])
    transfers = []
    for peer in group.peers():
        transfers += group.sendrecv(encoded[peer], peer, payloads[peer], peer, tag)
    yield transfers
    codec.decode_reduce(payloads, own, op, scale)
    SCRATCH.give_back(scratch)
    return codec.encode(own)
