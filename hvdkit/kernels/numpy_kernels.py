"""The kernels in numpy: their specification, the fallback where no C++ was compiled, and the oracle in the tests.

Kernels raise TypeError for a wrong type or dtype, and ValueError for a wrong length, shape, overlap or number. Only the
native code checks arguments, since a wrong argument would be fatal there.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import numpy as np

from hvdkit.kernels.dtypes import BFLOAT16, HALVES, Array, Arrays
from hvdkit.kernels.reduce_op import ONE, ReduceOp, Scale

CHUNK = 1 << 15  # elements at a time, so that temporaries stay in the cache

# The C library's value of "as a process starts", no real address (fenv.h of glibc and musl).
_DEFAULT = ctypes.c_void_p(-1)
_ENVIRONMENT_BYTES = 64  # more than fenv_t has on any processor

# PyDLL: a call that only sets registers keeps the interpreter's lock.
_LIBRARY = ctypes.PyDLL(None) if sys.platform == "linux" else None
_HAS_ENVIRONMENT = hasattr(_LIBRARY, "fegetenv") and hasattr(_LIBRARY, "fesetenv")


class DefaultFloats:
    """A context in which this thread rounds to nearest and keeps subnormal numbers, as csrc/default_floats.h.

    A thread may flush them to zero otherwise (``torch.set_flush_denormal``). Without effect where the C library cannot
    set this.
    """

    def __init__(self) -> None:
        self._before = ctypes.create_string_buffer(_ENVIRONMENT_BYTES)

    def __enter__(self) -> None:
        if _LIBRARY is not None and _HAS_ENVIRONMENT:
            _LIBRARY.fegetenv(self._before)
            _LIBRARY.fesetenv(_DEFAULT)

    def __exit__(self, *error: object) -> None:
        if _LIBRARY is not None and _HAS_ENVIRONMENT:
            _LIBRARY.fesetenv(self._before)


def reduce_into(destination: Array | Arrays, sources: Arrays, op: ReduceOp, scale: float | Scale = 1.0) -> None:
    """Compute ``destination[i] = scale * (sources[0][i] op sources[1][i] op ...)``, in the order of the sources.

    ``destination`` may be among the sources, or several arrays that do not overlap and all get the result.

    ``op`` is SUM, MIN, MAX or PRODUCT. All arrays are flat, contiguous and of one length and dtype. float16 and
    bfloat16 are accumulated and scaled in float32 and rounded to nearest even once, or not at all if ``destination``
    is float32. Other dtypes use their own arithmetic: integers wrap. ``scale`` is a factor or a Scale, which has the
    rounding of floats; integers are divided exactly, multiplied in float64, truncated toward zero, and clamped beyond
    the dtype's range. For bool, SUM and MAX are "or", PRODUCT and MIN are "and". In MIN and MAX a NaN wins, and of
    values that compare equal (-0.0 and 0.0) the later.
    """
    destinations = [destination] if isinstance(destination, np.ndarray) else destination
    scale = Scale(*scale) if isinstance(scale, tuple) else Scale(scale)
    with np.errstate(all="ignore"), DefaultFloats():
        for begin in range(0, destinations[0].size, CHUNK):
            block = slice(begin, begin + CHUNK)
            accumulator = _widened(sources[0][block])
            for source in sources[1:]:
                accumulator = _combined(op, accumulator, _widened(source[block]))
            if scale != ONE:
                accumulator = _scaled(accumulator, scale)
            result = accumulator.astype(destinations[0].dtype)
            for array in destinations:
                array[block] = result


def scale_into(destination: Array, source: Array, factor: float | Scale) -> None:
    """Compute ``destination[i] = factor * source[i]``, with the dtypes and rounding of ``reduce_into``."""
    reduce_into(destination, [source], ReduceOp.SUM, factor)


def convert_into(destination: Array, source: Array) -> None:
    """Compute ``destination[i] = source[i]`` between float16, bfloat16, float32 and float64, rounded to even once."""
    with np.errstate(all="ignore"), DefaultFloats():
        for begin in range(0, destination.size, CHUNK):
            block = slice(begin, begin + CHUNK)
            values = source[block]
            if source.dtype == np.float64 and destination.dtype == BFLOAT16:
                values = _rounded_to_odd(values)  # ml_dtypes would round twice, by way of float32
            destination[block] = values.astype(destination.dtype)


def _widened(values: Array) -> Array:
    if values.dtype in HALVES:
        return values.astype(np.float32)
    if values.dtype == np.bool_:
        return np.asarray(values.view(np.uint8) != 0)  # any byte but 0 is true: a peer may have sent others than 1
    return values


def _combined(op: ReduceOp, a: Array, b: Array) -> Array:
    if a.dtype == np.bool_:
        return (a | b) if op in (ReduceOp.SUM, ReduceOp.MAX) else (a & b)
    if op in (ReduceOp.SUM, ReduceOp.PRODUCT):
        return np.asarray(a + b if op == ReduceOp.SUM else a * b)
    # Not numpy.minimum: which of -0.0 and 0.0 it takes depends on the processor.
    better = a < b if op == ReduceOp.MIN else a > b
    return np.where(better | (a != a), a, b)


def _scaled(values: Array, scale: Scale) -> Array:
    dtype = values.dtype
    if dtype.kind == "f":
        if scale.factor == 1.0:
            return np.asarray(values / dtype.type(scale.divisor))
        return np.asarray(values * dtype.type(scale.number))
    if scale.factor == 1.0:
        return _divided(values, scale.divisor)
    product = values.astype(np.float64) * scale.factor / scale.divisor
    limits = np.iinfo(dtype)
    # The upper limit of 64 bits is no float64: compare with the power of two above it.
    too_high, too_low = product >= float(limits.max + 1), product <= float(limits.min)
    inside = ~(too_high | too_low | np.isnan(product))
    truncated = np.where(inside, product, 0.0).astype(dtype)
    truncated[too_high] = limits.max
    truncated[too_low] = limits.min
    return truncated


def _divided(values: Array, divisor: int) -> Array:
    """Return integers divided exactly and toward zero; numpy's own division goes toward minus infinity."""
    wide = values.astype(np.uint64 if values.dtype == np.uint64 else np.int64)
    number = wide.dtype.type(divisor)
    quotient = wide // number
    quotient += ((wide % number != 0) & (wide < 0)).astype(wide.dtype)
    return np.asarray(quotient.astype(values.dtype))


def _rounded_to_odd(values: Array) -> Array:
    """Return float64 as float32 by truncation, with the last bit set where anything was lost.

    A later rounding to fewer bits then knows the value's side of a tie (Boldo and Melquiond, 2008).
    """
    nearest = values.astype(np.float32)
    back: np.ndarray[Any, np.dtype[Any]] = nearest.astype(np.float64)
    words = nearest.view(np.uint32)
    words = words - (np.abs(back) > np.abs(values))  # a magnitude's bits count like an integer
    words = words | ((back != values) & (values == values))
    return np.asarray(words, dtype=np.uint32).view(np.float32)


_LANES = 8
_STEP = 4 * _LANES  # bytes
_MASK = (1 << 64) - 1
_STEPS = 1 << 13  # at a time
# The order in which lanes are folded: of each vector of the native code the lower words, then the upper.
_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def checksum(array: Array) -> int:
    """Return 64 bits by which to compare the bytes of contiguous arrays. Not cryptographic: easy to forge.

    In the way of Fletcher (1982): words of 32 bits, filled up with zeros at the end, go to eight lanes in turn, each
    with a sum and a sum of the sums, modulo 2**64; these and the number of bytes are folded into one number by
    multiplications that lose nothing. A changed word changes a sum, and words of a lane that changed places change a
    sum of sums, whatever they are; any other change goes unseen with a chance of about 2**-64.
    """
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8) if array.size else np.zeros(0, np.uint8)
    sums, weighted = np.zeros(_LANES, np.uint64), np.zeros(_LANES, np.uint64)
    for begin in range(0, data.size, _STEPS * _STEP):
        part = data[begin : begin + _STEPS * _STEP]
        words = np.zeros((-(-part.size // _STEP), _LANES), np.uint32)
        words.reshape(-1).view(np.uint8)[: part.size] = part
        times = np.arange(len(words), 0, -1, dtype=np.uint64)  # how often the sum of sums counts each word
        weighted += np.uint64(len(words)) * sums + (times[:, None] * words).sum(axis=0, dtype=np.uint64)
        sums += words.sum(axis=0, dtype=np.uint64)
    result = data.size
    for lane in _ORDER:
        result = (result ^ int(sums[lane])) * 0x9E3779B97F4A7C15 & _MASK
        result ^= result >> 32
        result = (result ^ int(weighted[lane])) * 0xC2B2AE3D27D4EB4F & _MASK
        result ^= result >> 29
    return result
