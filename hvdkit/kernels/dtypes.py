"""The dtypes that the kernels know, bfloat16 among them, which numpy has only through ml_dtypes."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Arrays = list[Array] | tuple[Array, ...]

BFLOAT16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)

# By name, in the order of the native code's enum: the place of a dtype is its number there.
_INTEGERS = ("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")
DTYPES: dict[str, np.dtype[Any]] = {
    name: np.dtype(name) for name in (*_INTEGERS, "float16", "bfloat16", "float32", "float64")
}

# The kernels sum, average and encode a complex element as a pair of real numbers.
COMPLEX: dict[str, np.dtype[Any]] = {name: np.dtype(name) for name in ("complex64", "complex128")}

# str(dtype) takes numpy microseconds.
NAMES = {dtype: name for name, dtype in {**DTYPES, **COMPLEX}.items()}

# Summed in float32 and rounded once at the end.
HALVES = frozenset({DTYPES["float16"], BFLOAT16})

# What convert_into takes.
FLOATS = HALVES | {DTYPES["float32"], DTYPES["float64"]}


def as_real(flat: Array) -> Array:
    """Return the memory of a flat contiguous array as real numbers, of which a complex element is a pair."""
    return flat.view(flat.real.dtype) if flat.dtype.kind == "c" else flat
