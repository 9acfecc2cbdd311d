"""Checks of what codec kernels are given: the twin of csrc/codec_arguments.cpp, with the same messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from hvdkit.kernels.checks import Array, check_array
from hvdkit.kernels.dtypes import NAMES

LARGEST_BLOCK = 1 << 30
LARGEST_WORD = 0xFFFFFFFF

FLOAT32, UINT32, UINT8 = np.dtype(np.float32), np.dtype(np.uint32), np.dtype(np.uint8)


def _message(function: str, argument: str, expected: str, got: str) -> str:
    return f"{function}: {argument}: expected {expected}, got {got}"


def check_typed(function: str, argument: str, array: object, dtype: np.dtype[Any], writable: bool = False) -> None:
    """A flat contiguous array of one dtype."""
    check_array(function, argument, array, writable)
    assert isinstance(array, np.ndarray)
    if array.dtype != dtype:
        raise TypeError(_message(function, argument, NAMES[dtype], str(array.dtype)))


def check_optional_floats(function: str, argument: str, array: object, writable: bool = False) -> None:
    """None is nothing."""
    if array is not None:
        check_typed(function, argument, array, FLOAT32, writable)


def check_inputs(function: str, values: Array | None, residual: Array | None, writable_residual: bool) -> int:
    """Values and residual, of which one may be None: returns their number of elements, which is the same."""
    if values is None and residual is None:
        raise ValueError(_message(function, "values", "an array here or as residual", "None"))
    check_optional_floats(function, "values", values)
    check_optional_floats(function, "residual", residual, writable_residual)
    if values is not None and residual is not None:
        check_count(function, "residual", residual, values.size, "as in values")
    one = values if values is not None else residual
    assert one is not None
    return one.size


def check_integer(function: str, argument: str, number: object, low: int, high: int) -> None:
    """From ``low`` to ``high``, both included."""
    _check_is_integer(function, argument, number)
    if not low <= number <= high:  # type: ignore[operator]
        raise ValueError(_message(function, argument, f"an integer from {low} to {high}", repr(number)))


def check_block(function: str, block: object, multiple: int) -> None:
    """Elements a block."""
    _check_is_integer(function, "block", block)
    if not multiple <= block <= LARGEST_BLOCK or block % multiple != 0:  # type: ignore[operator]
        expected = f"a multiple of {multiple} from {multiple} to {LARGEST_BLOCK}"
        raise ValueError(_message(function, "block", expected, repr(block)))


def check_bits(function: str, bits: object) -> None:
    """Bits a code."""
    _check_is_integer(function, "bits", bits)
    if bits not in (4, 8):
        raise ValueError(_message(function, "bits", "4 or 8", repr(bits)))


def check_seed(function: str, seed: object) -> None:
    """None is nothing."""
    if seed is not None:
        check_integer(function, "seed", seed, 0, LARGEST_WORD)


def check_threshold(function: str, threshold: float) -> None:
    """A number that is finite and not negative as a float32."""
    with np.errstate(over="ignore"):
        rounded = np.float32(threshold)
    if not (np.isfinite(rounded) and rounded >= 0):
        expected = "a finite float32 that is not negative"
        raise ValueError(_message(function, "threshold", expected, repr(float(threshold))))


def check_count(function: str, argument: str, array: Array, count: int, what: str) -> None:
    """``what`` tells why there must be so many elements."""
    if array.size != count:
        raise ValueError(_message(function, argument, f"{count} elements {what}", str(array.size)))


def check_places(function: str, values: Array | None, count: int) -> None:
    """A position must fit in 32 bits."""
    if count > LARGEST_WORD:
        argument = "residual" if values is None else "values"
        raise ValueError(_message(function, argument, f"at most {LARGEST_WORD} elements", str(count)))


def check_indices(function: str, argument: str, indices: Array, count: int) -> None:
    """Each one above the one before it, and all of them below ``count``."""
    bad = indices >= count
    bad[1:] |= indices[1:] <= indices[:-1]
    if bad.any():
        place = int(bad.argmax())
        got = str(indices[place]) + (f" after {indices[place - 1]}" if place > 0 else "")
        raise ValueError(_message(function, argument, f"ascending indices below {count}", got))


def check_bytes(function: str, argument: str, array: object) -> None:
    """A contiguous array of any shape and any dtype but object, whose bytes are addresses."""
    if not isinstance(array, np.ndarray):
        raise TypeError(_message(function, argument, "a numpy.ndarray", type(array).__name__))
    if array.dtype.hasobject:
        raise TypeError(_message(function, argument, "a dtype without objects", str(array.dtype)))
    if not array.flags.c_contiguous:
        raise ValueError(_message(function, argument, "a contiguous array", "a strided one"))


def check_all_apart(
    function: str, written: Mapping[str, Array | None], read: Mapping[str, Array | None] | None = None
) -> None:
    """What is written has no memory in common with any other argument."""
    outputs = [(name, array) for name, array in written.items() if array is not None]
    inputs = [(name, array) for name, array in (read or {}).items() if array is not None]
    for k, (name, array) in enumerate(outputs):
        for other_name, other in [*outputs[:k], *inputs]:
            begin, other_begin = array.ctypes.data, other.ctypes.data
            if begin < other_begin + other.nbytes and other_begin < begin + array.nbytes:
                raise ValueError(_message(function, name, f"memory apart from that of {other_name}", "an overlap"))


def _check_is_integer(function: str, argument: str, number: object) -> None:
    if not isinstance(number, int):
        raise TypeError(_message(function, argument, "an integer", type(number).__name__))
