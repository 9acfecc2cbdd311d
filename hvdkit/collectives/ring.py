"""Ring allreduce: each chunk goes once around the ring to be reduced, and once more to be told.

Patarasuk and Yuan (2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations"). 2 (P - 1) rounds; in
each a rank sends one chunk to the right and receives one from the left. Each rank sends 2 n (P - 1) / P bytes, the
least possible, over one link only; latency grows with P.

Chunk c is summed in the order of ranks c + 1, c + 2, ..., c: the same bits on all ranks and in every run, but not those
of a sum in rank order. Half precision and encoded partial sums are rounded to the type that travels at each of the
P - 1 hops.
"""

from __future__ import annotations

from hvdkit.collectives.chunks import chunks_of, decode_final, reduce_hop
from hvdkit.collectives.group import Array, Group, Steps
from hvdkit.compression import Cast
from hvdkit.kernels import ONE, ReduceOp, Scale


def bytes_sent(rank: int, size: int, nbytes: int) -> int:
    """What ``rank`` sends if the payload has ``nbytes`` bytes and chunks are equal; else only all ranks' sum holds."""
    return 2 * nbytes * (size - 1) // size


def ring_allreduce(group: Group, buffer: Array, op: ReduceOp, scale: Scale, codec: Cast, tag: int) -> Steps[None]:
    """Replace ``buffer`` (flat) by its reduction over all ranks. Uses ``tag`` and ``tag + 1``."""
    chunks = chunks_of(buffer, group.size)
    left, right = (group.rank - 1) % group.size, (group.rank + 1) % group.size
    for step in range(1, group.size):
        outgoing, own = chunks[(group.rank - step) % group.size], chunks[(group.rank - step - 1) % group.size]
        factor = scale if step == group.size - 1 else ONE
        yield from reduce_hop(group, outgoing, right, own, left, op, factor, codec, tag)
    encoded = [codec.encode(chunk) for chunk in chunks]
    for step in range(group.size - 1):
        outgoing, incoming = encoded[(group.rank - step) % group.size], encoded[(group.rank - step - 1) % group.size]
        yield group.sendrecv(outgoing, right, incoming, left, tag + 1)
    decode_final(codec, encoded, chunks)
