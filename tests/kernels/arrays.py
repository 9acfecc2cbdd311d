"""What the tests of the kernels share: both backends, flat arrays of every dtype at odd addresses, equality of bits."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from hvdkit.kernels import ReduceOp, numpy_kernels
from hvdkit.kernels.dtypes import BFLOAT16, DTYPES, HALVES

Array = npt.NDArray[Any]

try:
    native: ModuleType | None = importlib.import_module("hvdkit.kernels._native")
except ImportError:
    native = None

needs_native = pytest.mark.skipif(native is None, reason="hvdkit.kernels._native is not built: no C++ compiler found")

KERNEL_OPS = (ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT)
BACKENDS = [pytest.param(numpy_kernels, id="numpy"), pytest.param(native, id="native", marks=needs_native)]

# Where roundings, overflows and ties are.
_SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, np.inf, -np.inf, np.nan, 65504.0, 65519.996, 65520.0, 6e-8, 2.9802322e-8, 1e-45]
_SPECIAL += [3.4028235e38, 3.3961776e38, 1.0 + 2**-8, 1.0 + 3 * 2**-8, 2049.0, 2051.0, 6.1035156e-05, 6.0975552e-05]


def values(rng: np.random.Generator, dtype: np.dtype[Any], size: int) -> Array:
    """Any bit pattern, numbers near one, and the special ones, mixed."""
    if dtype == np.bool_:
        return rng.integers(0, 2, size).astype(np.bool_)
    patterns = np.frombuffer(rng.bytes(size * dtype.itemsize), dtype=dtype).copy()
    if dtype.kind in "iu":
        return np.asarray(np.where(rng.random(size) < 0.5, patterns, patterns % dtype.type(7)), dtype=dtype)
    with np.errstate(all="ignore"):
        near_one = rng.standard_normal(size).astype(dtype)
        special = np.asarray(_SPECIAL)[rng.integers(0, len(_SPECIAL), size)].astype(dtype)
    return np.asarray(np.choose(rng.integers(0, 3, size), [patterns, near_one, special]), dtype=dtype)


def misaligned(array: Array, offset: int) -> Array:
    """A copy that begins ``offset`` bytes after an aligned address."""
    raw = np.empty(array.nbytes + offset, dtype=np.uint8)
    copy = raw[offset:].view(array.dtype)
    copy[:] = array
    return copy


def bit_patterns(array: Array) -> Array:
    """Unsigned integers that are equal where the bits are, with one pattern for all NaN."""
    words = array.view(f"u{array.dtype.itemsize}").copy()
    if array.dtype.kind == "f" or array.dtype == BFLOAT16:
        with np.errstate(invalid="ignore"):  # a signalling NaN
            words[np.isnan(array.astype(np.float64))] = ~words.dtype.type(0)
    return words


def assert_same_bits(got: Array, expected: Array) -> None:
    """Equal bit for bit, except that a NaN is a NaN."""
    assert got.dtype == expected.dtype
    np.testing.assert_array_equal(bit_patterns(got), bit_patterns(expected))


def reduced(kernels: Any, sources: list[Array], op: ReduceOp, scale: Any = 1.0, into: Any = None) -> Array:
    destination = np.empty(sources[0].size, into or sources[0].dtype)
    kernels.reduce_into(destination, sources, op, scale)
    return destination


def destinations(dtype: np.dtype[Any]) -> list[np.dtype[Any]]:
    """The dtypes that sources of ``dtype`` may be reduced to."""
    return [dtype, DTYPES["float32"]] if dtype in HALVES else [dtype]
