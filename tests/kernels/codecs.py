"""What the tests of codec kernels share: both backends, values that are hard on codecs, arrays of the right lengths."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hvdkit.kernels import numpy_codecs, numpy_kernels, numpy_sparse
from tests.kernels.arrays import Array, misaligned, native, needs_native

# All kernels of numpy in one place, as the native ones are.
twins = SimpleNamespace(**vars(numpy_codecs) | vars(numpy_sparse) | vars(numpy_kernels))
CODEC_BACKENDS = [pytest.param(twins, id="numpy"), pytest.param(native, id="native", marks=needs_native)]

# Around the widths of vectors and of blocks, and beyond one chunk of the native code.
SIZES = [0, 1, 15, 16, 17, 31, 33, 255, 256, 257, 511, 512, 513, 2047, 2049, 4099]

LARGEST = float(np.finfo(np.float32).max)

# What a gradient may hold, from the likely to the broken.
KINDS = {
    "normal": lambda rng, n: rng.standard_normal(n),
    "spread": lambda rng, n: rng.standard_normal(n) * 10.0 ** rng.uniform(-44, 36, n),
    "sparse": lambda rng, n: rng.standard_normal(n) * (rng.random(n) < 0.02),
    "zeros": lambda rng, n: np.copysign(0.0, rng.standard_normal(n)),
    "equal": lambda rng, n: np.full(n, -0.3),
    "few levels": lambda rng, n: rng.integers(-3, 4, n) / 2,
    "denormal": lambda rng, n: rng.standard_normal(n) * 1e-41,
    "huge": lambda rng, n: rng.choice([LARGEST, -LARGEST, 3e38, -1.7e38, 1.0], n),
    "some not finite": lambda rng, n: np.where(
        rng.random(n) < 0.002, rng.choice([np.nan, np.inf, -np.inf], n), rng.standard_normal(n)
    ),
    "many not finite": lambda rng, n: rng.choice([np.nan, np.inf, -np.inf, 1.0, -0.0], n),
}

FINITE = [kind for kind in KINDS if kind not in ("some not finite", "many not finite", "huge")]
each_finite_kind = pytest.mark.parametrize("kind", FINITE)

_GUARD = 64


def floats(rng: np.random.Generator, kind: str, size: int) -> Array:
    return np.asarray(KINDS[kind](rng, size), dtype=np.float32)


def parts(count: int, size: int) -> int:
    return -(-count // size)


def quantised(kernels: Any, values: Array, residual: Array | None, bits: int, block: int, seed: int | None = None):
    """Codes and scales; the arrays begin at odd addresses and held other things before."""
    codes = misaligned(np.full(parts(values.size * bits, 8), 77, np.uint8), 1)
    scales = misaligned(np.full(parts(values.size, block), 7.0, np.float32), 3)
    kernels.quantise_into(codes, scales, values, residual, bits, block, seed)
    return codes, scales


def dequantised(kernels: Any, codes: Array, scales: Array, size: int, bits: int, block: int) -> Array:
    out = np.full(size, 5.0, np.float32)
    kernels.dequantise_into(out, codes, scales, bits, block)
    return out


def signs(kernels: Any, values: Array, residual: Array | None, block: int):
    """Bits and scales, as ``quantised``."""
    packed = misaligned(np.full(parts(values.size, 8), 77, np.uint8), 1)
    scales = misaligned(np.full(parts(values.size, block), 7.0, np.float32), 3)
    kernels.sign_into(packed, scales, values, residual, block)
    return packed, scales


def selected(kernels: Any, values: Array | None, residual: Array | None, threshold: float, capacity: int):
    """Indices and values as far as they were emitted, how many these are, and how many were found."""
    indices = misaligned(np.full(capacity, 99, np.uint32), 1)
    picked = misaligned(np.full(capacity, 9.0, np.float32), 3)
    emitted, found = kernels.select_into(indices, picked, values, residual, threshold)
    return indices[:emitted], picked[:emitted], emitted, found


def copied(array: Array | None, offset: int = 0) -> Array | None:
    return None if array is None else misaligned(array, offset)


def guarded(array: Array) -> tuple[Array, Array]:
    """A copy, and the whole memory that it stands in the middle of."""
    raw = np.full(array.nbytes + 2 * _GUARD, 0xA5, np.uint8)
    inner = raw[_GUARD : _GUARD + array.nbytes].view(array.dtype)
    inner[:] = array
    return inner, raw


def assert_guards(*memories: Array) -> None:
    """Nothing was written beside the arrays in the middle."""
    for raw in memories:
        assert (raw[:_GUARD] == 0xA5).all()
        assert (raw[-_GUARD:] == 0xA5).all()
