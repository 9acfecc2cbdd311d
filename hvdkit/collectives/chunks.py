"""What allreduce algorithms share: the chunks of a buffer, room for payloads, and the end: codec and scale."""

from __future__ import annotations

from collections.abc import Sequence

from hvdkit import kernels
from hvdkit.collectives.group import Array, Group, partition
from hvdkit.collectives.scratch import SCRATCH
from hvdkit.compression import Cast
from hvdkit.kernels import ONE, ReduceOp, Scale
from hvdkit.transports.base import Bytes


def chunks_of(buffer: Array, parts: int) -> list[Array]:
    """Views of ``buffer`` (flat), cut on cache lines; late ones may be empty."""
    return [buffer[start:stop] for start, stop in partition(buffer.size, parts, buffer.itemsize)]


def room_for_payloads(group: Group, own: Array) -> tuple[Bytes, list[Array]]:
    """Scratch memory, for the caller to give back, and a payload for each rank: ``own`` itself, the others' in it."""
    scratch = SCRATCH.take(own.nbytes * (group.size - 1))
    payloads = [own] * group.size
    for index, peer in enumerate(group.peers):
        payloads[peer] = scratch[index * own.nbytes : (index + 1) * own.nbytes].view(own.dtype)
    return scratch, payloads


def encode_all(codec: Cast, chunks: Sequence[Array]) -> tuple[Bytes, list[Array]]:
    """Scratch memory, for the caller to give back, and each chunk's payload, in it where that is not the chunk."""
    scratch = SCRATCH.take(sum(codec.room_bytes(chunk) for chunk in chunks))
    payloads, begin = [], 0
    for chunk in chunks:
        end = begin + codec.room_bytes(chunk)
        payloads.append(codec.encode(chunk, scratch[begin:end]))
        begin = end
    return scratch, payloads


def decode_final(codec: Cast, payloads: Sequence[Array], chunks: Sequence[Array]) -> None:
    """Fill each chunk from the payload that its owner encoded, the owner too: so all ranks hold the same bits.

    The payloads of a codec that loses nothing are the chunks themselves.
    """
    if codec.lossy:
        for payload, chunk in zip(payloads, chunks, strict=True):
            codec.decode_reduce([payload], chunk, ReduceOp.SUM, ONE)


def scale_in_place(buffer: Array, scale: Scale) -> None:
    """``buffer = scale * buffer``, untouched where that changes nothing."""
    if scale != ONE:
        kernels.scale_into(buffer, buffer, scale)
