"""Allreduce in place, in rank order: everyone's whole tensor where latency rules, two-phase where bandwidth does.

Both algorithms add the same numbers in the same order and round once at the end, so the bits of the result do not
depend on which of them ran. Two-phase (exchange chunks, sum own chunk, gather) sends 2 n (P - 1) / P bytes a rank, the
lower bound of Patarasuk and Yuan (2009), and is where a codec fits: what travels is encoded, sums are fp32.
"""

from __future__ import annotations

from hvdkit import kernels
from hvdkit.collectives.group import Array, Group, Steps, partition
from hvdkit.collectives.scratch import SCRATCH
from hvdkit.compression.codec import Codec
from hvdkit.kernels import ReduceOp

# Below this total the second phase's latency costs more than the bytes that it saves.
GATHER_BYTES = 32 * 1024


def choose_allreduce(nbytes: int, size: int) -> tuple[str, str]:
    """The algorithm for one tensor of ``nbytes`` bytes on ``size`` ranks, and the reason."""
    if nbytes * size <= GATHER_BYTES:
        return "gather", f"{nbytes} bytes x {size} ranks <= {GATHER_BYTES}: one exchange instead of two"
    return "two_phase", f"{nbytes} bytes x {size} ranks > {GATHER_BYTES}: least bytes on the wire"


def allreduce(group: Group, buffer: Array, op: ReduceOp, scale: float, codec: Codec, tag: int) -> Steps[None]:
    """Replace ``buffer`` (flat) by ``scale * (rank 0's op rank 1's op ...)``. Uses ``tag`` and ``tag + 1``."""
    if group.size == 1:
        if codec.lossy and buffer.size:
            payload = codec.encode(buffer)
            codec.decode_reduce([payload], buffer, op, 1.0)
        if scale != 1.0:
            kernels.scale_into(buffer, buffer, scale)
        return
    name, _ = choose_allreduce(buffer.nbytes, group.size)
    algorithm = gather_allreduce if name == "gather" else two_phase_allreduce
    yield from algorithm(group, buffer, op, scale, codec, tag)


def gather_allreduce(group: Group, buffer: Array, op: ReduceOp, scale: float, codec: Codec, tag: int) -> Steps[None]:
    """Send the whole encoded tensor to everyone, reduce locally. Sends n (P - 1) bytes a rank in one exchange."""
    own = codec.encode(buffer)
    scratch = SCRATCH.take(own.nbytes * (group.size - 1))
    payloads: list[Array] = [own] * group.size
    transfers = []
    for index, peer in enumerate(group.peers()):
        payloads[peer] = scratch[index * own.nbytes : (index + 1) * own.nbytes].view(own.dtype)
        transfers.append(group.irecv(payloads[peer], peer, tag))
    transfers += [group.isend(own, peer, tag) for peer in group.peers()]
    yield transfers
    codec.decode_reduce(payloads, buffer, op, scale)
    SCRATCH.give_back(scratch)
    if codec.lossy:
        codec.decode_reduce([codec.encode(buffer)], buffer, ReduceOp.SUM, 1.0)


def two_phase_allreduce(group: Group, buffer: Array, op: ReduceOp, scale: float, codec: Codec, tag: int) -> Steps[None]:
    """Everyone reduces one chunk of the tensor, then hands it to all."""
    bounds = partition(buffer.size, group.size, buffer.itemsize)
    chunks = [buffer[start:stop] for start, stop in bounds]
    encoded = [codec.encode(chunk) for chunk in chunks]
    reduced = yield from exchange_and_reduce(group, encoded, chunks[group.rank], op, scale, codec, tag)
    transfers = []
    for peer in group.peers():
        if chunks[peer].size:
            transfers.append(group.irecv(encoded[peer], peer, tag + 1))
        if reduced.size:
            transfers.append(group.isend(reduced, peer, tag + 1))
    yield transfers
    if codec.lossy:
        encoded[group.rank] = reduced
        for chunk, payload in zip(chunks, encoded, strict=True):
            codec.decode_reduce([payload], chunk, ReduceOp.SUM, 1.0)


def exchange_and_reduce(
    group: Group, encoded: list[Array], own: Array, op: ReduceOp, scale: float, codec: Codec, tag: int
) -> Steps[Array]:
    """First phase: send chunk p to rank p, reduce what came for this rank into ``own``; returns it encoded again."""
    mine = encoded[group.rank]
    scratch = SCRATCH.take(mine.nbytes * (group.size - 1))
    payloads: list[Array] = [mine] * group.size
    transfers = []
    for index, peer in enumerate(group.peers()):
        payloads[peer] = scratch[index * mine.nbytes : (index + 1) * mine.nbytes].view(mine.dtype)
        if mine.size:
            transfers.append(group.irecv(payloads[peer], peer, tag))
        if encoded[peer].size:
            transfers.append(group.isend(encoded[peer], peer, tag))
    yield transfers
    codec.decode_reduce(payloads, own, op, scale)
    SCRATCH.give_back(scratch)
    return codec.encode(own)
