"""Checks of the arrays that kernels are given: the twin of csrc/arguments.cpp, with the same messages."""

from __future__ import annotations

from math import ldexp
from operator import index
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdkit.kernels.dtypes import DTYPES, FLOATS, HALVES
from hvdkit.kernels.reduce_op import ReduceOp
from hvdkit.kernels.scale import LARGEST_DIVISOR, ONE, Scale

Array = npt.NDArray[Any]

KERNEL_OPS = (ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT)


def _message(function: str, argument: str, expected: str, got: str) -> str:
    return f"{function}: {argument}: expected {expected}, got {got}"


def check_array(function: str, argument: str, array: object, writable: bool = False) -> None:
    """A flat contiguous array of a dtype that the kernels know."""
    if not isinstance(array, np.ndarray):
        raise TypeError(_message(function, argument, "a numpy.ndarray", type(array).__name__))
    if array.dtype not in DTYPES.values():
        raise TypeError(_message(function, argument, "a dtype that the kernels know", str(array.dtype)))
    if array.ndim != 1:
        raise ValueError(_message(function, argument, "a flat array", f"{array.ndim} dimensions"))
    if not array.flags.c_contiguous:
        raise ValueError(_message(function, argument, "a contiguous array", "a strided one"))
    if writable and not array.flags.writeable:
        raise ValueError(_message(function, argument, "a writable array", "a read-only one"))


def check_array_list(function: str, argument: str, arrays: object, writable: bool = False) -> None:
    """At least one of them."""
    if not isinstance(arrays, list | tuple):
        raise TypeError(_message(function, argument, "a list or tuple of arrays", type(arrays).__name__))
    if not arrays:
        raise ValueError(_message(function, argument, "at least one array", "none"))
    for k, array in enumerate(arrays):
        check_array(function, f"{argument}[{k}]", array, writable)


def check_op(function: str, op: object) -> None:
    """AVERAGE is SUM with a scale and ADASUM an algorithm: no kernels."""
    if not isinstance(op, int) or op not in KERNEL_OPS:
        raise ValueError(_message(function, "op", "SUM, MIN, MAX or PRODUCT", repr(op)))


def check_pair(function: str, destination: Array, argument: str, source: Array) -> None:
    """Lengths agree, and the source does not overlap the destination unless it is the destination."""
    if source.size != destination.size:
        raise ValueError(
            _message(function, argument, f"{destination.size} elements as in destination", str(source.size))
        )
    begin, source_begin = destination.ctypes.data, source.ctypes.data
    end, source_end = begin + destination.nbytes, source_begin + source.nbytes
    same = (begin, end) == (source_begin, source_end)
    if not same and begin < source_end and source_begin < end:
        expected = "the destination's own memory or memory apart from it"
        raise ValueError(_message(function, argument, expected, "a partial overlap"))


def check_apart(function: str, name: str, destination: Array, other_name: str, other: Array) -> None:
    """Two destinations have no memory in common, and one dtype."""
    if destination.dtype != other.dtype:
        raise TypeError(_message(function, other_name, f"{destination.dtype} as in {name}", str(other.dtype)))
    begin, other_begin = destination.ctypes.data, other.ctypes.data
    if begin < other_begin + other.nbytes and other_begin < begin + destination.nbytes:
        raise ValueError(_message(function, other_name, f"memory apart from that of {name}", "an overlap"))


def check_reduction_dtypes(
    function: str, name: str, destination: Array, names: list[str], sources: list[Array]
) -> None:
    """Sources share one dtype, which is the destination's; halves may also go to a float32 destination."""
    first = sources[0].dtype
    for source_name, source in zip(names, sources, strict=True):
        if source.dtype != first:
            raise TypeError(_message(function, source_name, f"{first} as in {names[0]}", str(source.dtype)))
    mixed = first in HALVES and destination.dtype == np.float32
    if destination.dtype != first and not mixed:
        expected = f"{first}{' or float32' if first in HALVES else ''} for sources of {first}"
        raise TypeError(_message(function, name, expected, str(destination.dtype)))


def check_scale(function: str, argument: str, scale: object, dtype: np.dtype[Any]) -> Scale:
    """A number, or a Scale: a tuple of factor and divisor. A truth value has no multiple."""
    try:
        # Unlike float(), ldexp takes no strings.
        factor, divisor = scale if isinstance(scale, tuple) and len(scale) == 2 else (scale, 1)
        checked = Scale(ldexp(factor, 0), index(divisor))  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(_message(function, argument, "a number or a Scale", repr(scale))) from None
    if not 1 <= checked.divisor <= LARGEST_DIVISOR:
        expected = f"a divisor from 1 to {LARGEST_DIVISOR}"
        raise ValueError(_message(function, argument, expected, str(checked.divisor)))
    if dtype == np.bool_ and checked != ONE:
        raise ValueError(_message(function, argument, "1.0 for bool arrays", repr(scale)))
    return checked


def check_float_dtype(function: str, argument: str, array: Array) -> None:
    """Conversions are between floating dtypes."""
    if array.dtype not in FLOATS:
        raise TypeError(_message(function, argument, "float16, bfloat16, float32 or float64", str(array.dtype)))
