"""The dtypes that the kernels know, bfloat16 among them, which numpy has only through ml_dtypes."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

BFLOAT16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)

# By name, in the order of the native code's enum: the place of a dtype is its number there.
DTYPES: dict[str, np.dtype[Any]] = {
    str(dtype): dtype
    for dtype in (
        np.dtype(np.bool_),
        np.dtype(np.uint8),
        np.dtype(np.int8),
        np.dtype(np.uint16),
        np.dtype(np.int16),
        np.dtype(np.uint32),
        np.dtype(np.int32),
        np.dtype(np.uint64),
        np.dtype(np.int64),
        np.dtype(np.float16),
        BFLOAT16,
        np.dtype(np.float32),
        np.dtype(np.float64),
    )
}

# str(dtype) takes numpy microseconds.
NAMES = {dtype: name for name, dtype in DTYPES.items()}

# Summed in float32 and rounded once at the end.
HALVES = frozenset({DTYPES["float16"], BFLOAT16})

# What convert_into takes.
FLOATS = HALVES | {DTYPES["float32"], DTYPES["float64"]}
