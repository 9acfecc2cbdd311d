"""Tree allreduce: a binomial tree reduces to rank 0, and the same tree broadcasts the result.

The algorithm of MPICH's MPI_Reduce and MPI_Bcast for short messages (Thakur, Rabenseifner and Gropp, 2005,
"Optimization of collective communication operations in MPICH"). 2 log2 P rounds. Each edge of the tree carries n bytes
up and n down: rank 0 sends n ceil(log2 P), another rank n (1 + its children), a leaf n.

Rank r's parent is r without its lowest bit. Neighbouring runs of ranks are summed, the lower one first: the same bits
on all ranks and in every run, but not those of a sum in rank order. Half precision and encoded partial sums are rounded
to the type that travels at each of the up to log2 P hops.
"""

from __future__ import annotations

from hvdkit.collectives.broadcast import tree_broadcast
from hvdkit.collectives.chunks import decode_final, reduce_hop
from hvdkit.collectives.group import Array, Group, Steps
from hvdkit.compression import Cast
from hvdkit.kernels import ONE, ReduceOp, Scale


def children(rank: int, size: int) -> list[int]:
    """The ranks whose parent is ``rank``, nearest first."""
    found = []
    distance = 1
    while rank + distance < size and not rank & distance:
        found.append(rank + distance)
        distance *= 2
    return found


def bytes_sent(rank: int, size: int, nbytes: int) -> int:
    """What ``rank`` sends if the payload of the tensor has ``nbytes`` bytes."""
    return nbytes * (len(children(rank, size)) + (rank != 0))


def tree_allreduce(group: Group, buffer: Array, op: ReduceOp, scale: Scale, codec: Cast, tag: int) -> Steps[None]:
    """Replace ``buffer`` (flat) by its reduction over all ranks. Uses ``tag`` and ``tag + 1``."""
    if buffer.size == 0:
        return
    nothing = buffer[:0]
    below = children(group.rank, group.size)
    for child in below:
        factor = scale if group.rank == 0 and child == below[-1] else ONE
        yield from reduce_hop(group, nothing, child, buffer, child, op, factor, codec, tag)
    payload = codec.encode(buffer)
    if group.rank != 0:
        yield [group.isend(payload, group.rank & (group.rank - 1), tag)]
    yield from tree_broadcast(group, payload, 0, tag + 1)
    decode_final(codec, [payload], [buffer])
