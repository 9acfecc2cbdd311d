"""Payloads on the wire: a header that says what follows, so that what arrives damaged is an error and nothing else."""

from __future__ import annotations

import struct
import zlib

import numpy as np

from hvdkit import kernels
from hvdkit.compression.codec import Bytes
from hvdkit.errors import PayloadError

_HEADER = struct.Struct("<4sIQQQ")  # magic, codec, elements, bytes of the payload, checksum of the payload
_MAGIC = b"hvdC"
HEADER_BYTES = 64  # a cache line, so that payloads are aligned


def identity(summary: str) -> int:
    """A number for a codec and its parameters."""
    return zlib.crc32(summary.encode())


def seal(frame: Bytes, nbytes: int, elements: int, codec: int) -> Bytes:
    """Write the header of a payload of ``nbytes`` bytes that lies behind it; returns the frame to send."""
    payload = frame[HEADER_BYTES : HEADER_BYTES + nbytes]
    header = _HEADER.pack(_MAGIC, codec, elements, nbytes, kernels.checksum(payload))
    frame[:HEADER_BYTES] = 0
    frame[: _HEADER.size] = np.frombuffer(header, dtype=np.uint8)
    return frame[: HEADER_BYTES + nbytes]


def unseal(frame: Bytes, elements: int, codec: int, sender: int) -> Bytes:
    """The payload of a frame. Raises PayloadError where it is not the one that was sent, naming the sender."""
    if frame.nbytes < HEADER_BYTES:
        raise PayloadError(sender, f"it has {frame.nbytes} bytes, fewer than its header")
    magic, its_codec, its_elements, nbytes, checksum = _HEADER.unpack(frame[: _HEADER.size].tobytes())
    if magic != _MAGIC or frame[_HEADER.size : HEADER_BYTES].any():
        raise PayloadError(sender, "it does not begin with a header")
    if its_codec != codec:
        raise PayloadError(sender, "it is of another codec, or of other parameters")
    if its_elements != elements:
        raise PayloadError(sender, f"it is of {its_elements} elements, where {elements} are expected")
    payload = frame[HEADER_BYTES:]
    if nbytes != payload.nbytes:
        raise PayloadError(sender, f"it has {payload.nbytes} bytes, where its header says {nbytes}")
    if checksum != kernels.checksum(payload):
        raise PayloadError(sender, "its checksum is wrong")
    return payload
