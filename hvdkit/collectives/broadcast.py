"""Broadcast from one rank: a binomial tree where latency rules, scatter and allgather where bandwidth does.

Through the busiest rank go n log2 P bytes, or 2 n (P - 1) / P by the second (van de Geijn; Barnett et al., 1994).
"""

from __future__ import annotations

from hvdkit.collectives.exchange import allgather, chunks_of
from hvdkit.collectives.group import Array, Group, Steps

SCATTER_BYTES = 512 * 1024


def broadcast(group: Group, buffer: Array, root: int, tag: int) -> Steps[None]:
    """Replace ``buffer`` (flat) on every rank by the root's. Uses ``tag`` and ``tag + 1``."""
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
