"""The kernels in numpy: what they mean, the fallback where no C++ was compiled, and the oracle in the tests.

Errors for wrong arguments are the native code's, for which they would be fatal; here only what came from another rank
is checked.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hvdkit.kernels.dtypes import BFLOAT16, HALVES, Array
from hvdkit.kernels.numpy_floats import DefaultFloats
from hvdkit.kernels.reduce_op import ReduceOp
from hvdkit.kernels.scale import ONE, Scale

# Elements that are worked on at a time, so that temporaries are small and stay in the cache.
_BLOCK = 1 << 15


def reduce_into(
    destination: Array | list[Array] | tuple[Array, ...],
    sources: list[Array] | tuple[Array, ...],
    op: ReduceOp,
    scale: float | Scale = 1.0,
) -> None:
    """``destination[i] = scale * (sources[0][i] op sources[1][i] op ...)``, in the order of the sources.

    ``destination`` may be several arrays, apart from each other, which all get the result in one pass.

    ``op`` is SUM, MIN, MAX or PRODUCT. All arrays are flat, contiguous and of one length and dtype. float16 and
    bfloat16 are accumulated and scaled in float32 and rounded to nearest even once, or not at all if ``destination``
    is float32.
    Other dtypes use their own arithmetic: integers wrap. ``scale`` is a factor or a Scale, which says how floats are
    rounded; integers are divided exactly, multiplied in float64, truncated toward zero, and clamped beyond the dtype's
    range. For bool, SUM and MAX are "or", PRODUCT and MIN are "and". In MIN and MAX a NaN
    wins, and of values that compare equal (-0.0 and 0.0) the later one. ``destination`` may be one of the sources.

    Raises TypeError for a wrong type or dtype; ValueError for a wrong length, shape, overlap, operation or scale.
    """
    destinations = [destination] if isinstance(destination, np.ndarray) else destination
    at_last = Scale(*scale) if isinstance(scale, tuple) else Scale(scale)
    with np.errstate(all="ignore"), DefaultFloats():
        for begin in range(0, destinations[0].size, _BLOCK):
            block = slice(begin, begin + _BLOCK)
            accumulator = _widened(sources[0][block])
            for source in sources[1:]:
                accumulator = _combined(op, accumulator, _widened(source[block]))
            if at_last != ONE:
                accumulator = _scaled(accumulator, at_last)
            result = accumulator.astype(destinations[0].dtype)
            for one in destinations:
                one[block] = result


def scale_into(destination: Array, source: Array, factor: float | Scale) -> None:
    """``destination[i] = factor * source[i]``, with the dtypes, rounding and errors of ``reduce_into``."""
    reduce_into(destination, [source], ReduceOp.SUM, factor)


def convert_into(destination: Array, source: Array) -> None:
    """``destination[i] = source[i]`` between float16, bfloat16, float32 and float64, rounded to nearest even once.

    Raises TypeError for other dtypes, ValueError for a wrong length, shape or overlap.
    """
    with np.errstate(all="ignore"), DefaultFloats():
        for begin in range(0, destination.size, _BLOCK):
            block = slice(begin, begin + _BLOCK)
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
    if op == ReduceOp.SUM:
        return np.asarray(a + b)
    if op == ReduceOp.PRODUCT:
        return np.asarray(a * b)
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
    """Integers, exactly and toward zero, where numpy's own division goes toward the lower one."""
    wide = values.astype(np.uint64 if values.dtype == np.uint64 else np.int64)
    number = wide.dtype.type(divisor)
    quotient = wide // number
    quotient += ((wide % number != 0) & (wide < 0)).astype(wide.dtype)
    return np.asarray(quotient.astype(values.dtype))


def _rounded_to_odd(values: Array) -> Array:
    """float64 to float32 by truncation, with the last bit set where anything was lost (Boldo and Melquiond, 2008).

    A later rounding to fewer bits then sees which side of a tie the value was on.
    """
    nearest = values.astype(np.float32)
    back: np.ndarray[Any, np.dtype[Any]] = nearest.astype(np.float64)
    words = nearest.view(np.uint32)
    words = words - (np.abs(back) > np.abs(values))  # a magnitude's bits count like an integer
    words = words | ((back != values) & (values == values))
    return np.asarray(words, dtype=np.uint32).view(np.float32)
