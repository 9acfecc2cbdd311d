"""All-to-all allreduce: everyone sends its whole tensor to everyone and reduces by itself, in rank order.

The direct algorithm: one exchange, the least latency there is, and each rank sends n (P - 1) bytes. Sums have the bits
that one process gives; half precision is summed in fp32 and rounded once.
"""

from __future__ import annotations

from hvdkit.collectives.chunks import decode_final, room_for_payloads
from hvdkit.collectives.group import Array, Group, Steps
from hvdkit.collectives.scratch import SCRATCH
from hvdkit.compression import Cast
from hvdkit.kernels import ReduceOp, Scale


def all_to_all_allreduce(group: Group, buffer: Array, op: ReduceOp, scale: Scale, codec: Cast, tag: int) -> Steps[None]:
    """Replace ``buffer`` (flat) by its reduction over all ranks. Uses ``tag``."""
    if buffer.size == 0:
        return
    own = codec.encode(buffer)
    scratch, payloads = room_for_payloads(group, own)
    transfers = [group.irecv(payloads[peer], peer, tag) for peer in group.peers()]
    transfers += [group.isend(own, peer, tag) for peer in group.peers()]
    yield transfers
    codec.decode_reduce(payloads, buffer, op, scale)
    SCRATCH.give_back(scratch)
    # No owner has encoded the result, as in the other algorithms: every rank does, for the same bits as theirs.
    decode_final(codec, [codec.encode(buffer)], [buffer])
