"""Master-worker allreduce: everyone sends its tensor to rank 0, which reduces and sends the result to everyone.

The parameter server with one server (Li et al., 2014, "Scaling distributed machine learning with the parameter
server"), kept to compare with: two exchanges, but all of them through one link. Rank 0 sends n (P - 1) bytes, each
other rank n.

Sums are in rank order and have the bits that one process gives; half precision is summed in fp32 and rounded once.
"""

from __future__ import annotations

from hvdkit.collectives.chunks import decode_final, room_for_payloads
from hvdkit.collectives.group import Array, Group, Steps
from hvdkit.collectives.scratch import SCRATCH
from hvdkit.compression import Cast
from hvdkit.kernels import ReduceOp, Scale

MASTER = 0


def bytes_sent(rank: int, size: int, nbytes: int) -> int:
    """What ``rank`` sends if the payload of the tensor has ``nbytes`` bytes."""
    return nbytes * (size - 1) if rank == MASTER else nbytes


def master_worker_allreduce(
    group: Group, buffer: Array, op: ReduceOp, scale: Scale, codec: Cast, tag: int
) -> Steps[None]:
    """Replace ``buffer`` (flat) by its reduction over all ranks. Uses ``tag`` and ``tag + 1``."""
    if buffer.size == 0:
        return
    payload = codec.encode(buffer)
    if group.rank == MASTER:
        scratch, payloads = room_for_payloads(group, payload)
        yield [group.irecv(payloads[worker], worker, tag) for worker in group.peers()]
        codec.decode_reduce(payloads, buffer, op, scale)
        SCRATCH.give_back(scratch)
        payload = codec.encode(buffer)
        yield [group.isend(payload, worker, tag + 1) for worker in group.peers()]
    else:
        yield [group.isend(payload, MASTER, tag)]
        yield [group.irecv(payload, MASTER, tag + 1)]
    decode_final(codec, [payload], [buffer])
