"""Frames: payloads with a header on the wire, so that a damaged payload is an error and nothing else."""

from __future__ import annotations

import struct
import zlib

import numpy as np

from hvdkit import kernels
from hvdkit.compression.codec import Bytes
from hvdkit.errors import PayloadError

_HEADER = struct.Struct("<4sIQQQ")  # magic, codec, elements, bytes of the payload, checksum of the payload
_CHECK = struct.Struct("<I")  # checksum of the header: no rank may wait for bytes that a damaged length promises
_CHECKED_BYTES = _HEADER.size + _CHECK.size
_MAGIC = b"hvdC"
HEADER_BYTES = 64  # a cache line, so that payloads are aligned


def identity(summary: str) -> int:
    """Return a number for a codec and its parameters."""
    return zlib.crc32(summary.encode())


def seal(frame: Bytes, nbytes: int, elements: int, codec: int) -> None:
    """Write the header of a payload of ``nbytes`` bytes, which lies behind the header."""
    payload = frame[HEADER_BYTES : HEADER_BYTES + nbytes]
    header = _HEADER.pack(_MAGIC, codec, elements, nbytes, kernels.checksum(payload))
    frame[:HEADER_BYTES] = 0
    frame[:_CHECKED_BYTES] = np.frombuffer(header + _CHECK.pack(zlib.crc32(header)), dtype=np.uint8)


def nbytes_of(frame: Bytes, sender: int) -> int:
    """Return the bytes of a frame by its header; other memory may follow. Raises PayloadError, as ``unseal``."""
    return HEADER_BYTES + int(_header(frame, sender)[3])


def unseal(frame: Bytes, elements: int, codec: int, sender: int) -> Bytes:
    """Return the payload of a frame. Raises PayloadError, which names the sender, if it is not as it was sent."""
    _, its_codec, its_elements, nbytes, checksum = _header(frame, sender)
    if its_codec != codec:
        raise PayloadError(sender, "it was encoded by another codec, or with other parameters")
    if its_elements != elements:
        raise PayloadError(sender, f"it has {its_elements} elements, but {elements} are expected")
    payload = frame[HEADER_BYTES:]
    if nbytes != payload.nbytes:
        raise PayloadError(sender, f"it has {payload.nbytes} bytes, but its header says {nbytes}")
    if checksum != kernels.checksum(payload):
        raise PayloadError(sender, "its checksum is wrong")
    return payload


def _header(frame: Bytes, sender: int) -> tuple[bytes, int, int, int, int]:
    if frame.nbytes < HEADER_BYTES:
        raise PayloadError(sender, f"it has {frame.nbytes} bytes, fewer than its header")
    header = frame[: _HEADER.size].tobytes()
    fields: tuple[bytes, int, int, int, int] = _HEADER.unpack(header)
    if fields[0] != _MAGIC or frame[_CHECKED_BYTES:HEADER_BYTES].any():
        raise PayloadError(sender, "it does not begin with a header")
    if frame[_HEADER.size : _CHECKED_BYTES].tobytes() != _CHECK.pack(zlib.crc32(header)):
        raise PayloadError(sender, "the checksum of its header is wrong")
    return fields
