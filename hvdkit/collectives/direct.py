"""The direct algorithms, in which everyone sends to everyone: those that are chosen unasked.

Sums have the bits that one process gives; half precision is summed in fp32 and rounded once.
"""

from __future__ import annotations

from hvdkit.collectives.chunks import chunks_of, decode_final, encode_all, room_for_payloads
from hvdkit.collectives.exchange import Rounds, alltoall, exchange_and_reduce
from hvdkit.collectives.group import Array, Group, Steps
from hvdkit.collectives.scratch import SCRATCH
from hvdkit.compression import Cast
from hvdkit.kernels import ReduceOp, Scale


def all_to_all_allreduce(group: Group, buffer: Array, op: ReduceOp, scale: Scale, codec: Cast, tag: int) -> Steps[None]:
    """Everyone sends its whole tensor to everyone and reduces by itself, in rank order.

    One exchange, the least latency there is, and each rank sends n (P - 1) bytes. Uses ``tag``.
    """
    if buffer.size == 0:
        return
    own = codec.encode(buffer)
    scratch, payloads = room_for_payloads(group, own)
    transfers = [group.irecv(payloads[peer], peer, tag) for peer in group.peers]
    transfers += [group.isend(own, peer, tag) for peer in group.peers]
    yield transfers
    codec.decode_reduce(payloads, buffer, op, scale)
    SCRATCH.give_back(scratch)
    # No owner has encoded the result, as in the other algorithms: every rank does, for the same bits as theirs.
    decode_final(codec, [codec.encode(buffer)], [buffer])


def two_phase_allreduce(
    group: Group, buffer: Array, op: ReduceOp, scale: Scale, codec: Cast, tag: int, rounds: Rounds = None
) -> Steps[None]:
    """Chunk p of everyone goes to rank p, which reduces it in rank order and hands it to all.

    A direct reduce-scatter and a direct allgather: two exchanges, in ``rounds`` if given, and each rank sends
    2 n (P - 1) / P bytes, the lower bound of Patarasuk and Yuan (2009, "Bandwidth optimal all-reduce algorithms for
    clusters of workstations"). It is where a codec fits: what travels is encoded. Uses ``tag`` and ``tag + 1``.
    """
    chunks = chunks_of(buffer, group.size)
    scratch, encoded = encode_all(codec, chunks)
    own = yield from exchange_and_reduce(group, encoded, chunks[group.rank], op, scale, codec, tag, rounds)
    encoded[group.rank] = own
    yield from alltoall(group, [own] * group.size, encoded, tag + 1, rounds)
    decode_final(codec, encoded, chunks)
    SCRATCH.give_back(scratch)
