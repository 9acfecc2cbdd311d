"""The checksum of bytes in numpy: what it means, and the fallback where no C++ was compiled.

Errors for wrong arguments are the native code's; here only what came from another rank is checked.
"""

from __future__ import annotations

import numpy as np

from hvdkit.kernels.dtypes import Array

_LANES = 8
_STEP = 4 * _LANES  # bytes
_MASK = (1 << 64) - 1

# Steps that are worked on at a time.
_CHUNK = 1 << 13

# The lanes in the order in which they are folded: of each vector of the native code, the lower words, then the upper.
_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def checksum(array: Array) -> int:
    """64 bits that tell whether the bytes of a contiguous array are the same. Not cryptographic: easy to forge.

    In the way of Fletcher (1982): words of 32 bits, filled up with zeros at the end, go to eight lanes in turn, each
    with a sum and a sum of the sums, modulo 2**64; these and the number of bytes are folded into one number by
    multiplications that lose nothing. A changed word changes a sum, and words of a lane that changed places change a
    sum of sums, whatever they are; any other change goes unseen with a chance of about 2**-64.

    Raises TypeError for what is no array of plain bytes, ValueError for an array that is not contiguous.
    """
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8) if array.size else np.zeros(0, np.uint8)
    sums, weighted = np.zeros(_LANES, np.uint64), np.zeros(_LANES, np.uint64)
    for begin in range(0, data.size, _CHUNK * _STEP):
        part = data[begin : begin + _CHUNK * _STEP]
        words = np.zeros((-(-part.size // _STEP), _LANES), np.uint32)
        words.reshape(-1).view(np.uint8)[: part.size] = part
        steps = words.shape[0]
        times = np.arange(steps, 0, -1, dtype=np.uint64)  # how often the sum of sums counts each word
        weighted += np.uint64(steps) * sums + (times[:, None] * words).sum(axis=0, dtype=np.uint64)
        sums += words.sum(axis=0, dtype=np.uint64)
    return _folded(sums, weighted, data.size)


def _folded(sums: Array, weighted: Array, nbytes: int) -> int:
    result = nbytes
    for lane in _ORDER:
        result = (result ^ int(sums[lane])) * 0x9E3779B97F4A7C15 & _MASK
        result ^= result >> 32
        result = (result ^ int(weighted[lane])) * 0xC2B2AE3D27D4EB4F & _MASK
        result ^= result >> 29
    return result
