"""A wrong argument is an error that names function, argument, what was expected and what came: in both backends."""

from __future__ import annotations

import re

import numpy as np
import pytest

from hvdkit.kernels import BFLOAT16, ReduceOp, Scale
from tests.kernels.arrays import BACKENDS, native, needs_native

f4 = np.zeros(4, np.float32)
shared = np.zeros(8, np.float32)
read_only = np.zeros(4, np.float32)
read_only.flags.writeable = False
SUM = ReduceOp.SUM
KNOWN = "expected a dtype that the kernels know, got"

WRONG = [
    ("reduce_into", (1.0, [f4], SUM), TypeError, "destination: expected a numpy.ndarray, got float"),
    ("reduce_into", ([1.0], [f4], SUM), TypeError, "destination[0]: expected a numpy.ndarray, got float"),
    ("reduce_into", ([], [f4], SUM), ValueError, "destination: expected at least one array, got none"),
    (
        "reduce_into",
        ([f4, read_only], [f4], SUM),
        ValueError,
        "destination[1]: expected a writable array, got a read-only one",
    ),
    (
        "reduce_into",
        ([shared[:4], shared[2:6]], [f4], SUM),
        ValueError,
        "destination[1]: expected memory apart from that of destination[0], got an overlap",
    ),
    (
        "reduce_into",
        ([np.zeros(4, np.float16), f4], [np.zeros(4, np.float16)], SUM),
        TypeError,
        "destination[1]: expected float16 as in destination[0], got float32",
    ),
    ("reduce_into", (f4, f4, SUM), TypeError, "sources: expected a list or tuple of arrays, got ndarray"),
    ("reduce_into", (f4, [], SUM), ValueError, "sources: expected at least one array, got none"),
    ("reduce_into", (f4, [f4, None], SUM), TypeError, "sources[1]: expected a numpy.ndarray, got NoneType"),
    ("reduce_into", (np.zeros(4, "c8"), [f4], SUM), TypeError, f"destination: {KNOWN} complex64"),
    ("reduce_into", (f4, [np.zeros(4, ">f4")], SUM), TypeError, f"sources[0]: {KNOWN} >f4"),
    ("reduce_into", (f4, [np.zeros(4, "S3")], SUM), TypeError, f"sources[0]: {KNOWN} |S3"),
    ("reduce_into", (f4, [np.zeros(4, "M8[s]")], SUM), TypeError, f"sources[0]: {KNOWN} datetime64[s]"),
    ("reduce_into", (f4, [np.zeros(4, np.longdouble)], SUM), TypeError, f"sources[0]: {KNOWN} {np.dtype('g')}"),
    (
        "reduce_into",
        (f4, [np.zeros((2, 2), "f4")], SUM),
        ValueError,
        "sources[0]: expected a flat array, got 2 dimensions",
    ),
    (
        "reduce_into",
        (shared[::2], [f4], SUM),
        ValueError,
        "destination: expected a contiguous array, got a strided one",
    ),
    ("reduce_into", (read_only, [f4], SUM), ValueError, "destination: expected a writable array, got a read-only one"),
    ("reduce_into", (f4, [f4[:3]], SUM), ValueError, "sources[0]: expected 4 elements as in destination, got 3"),
    (
        "reduce_into",
        (f4, [f4, np.zeros(4)], SUM),
        TypeError,
        "sources[1]: expected float32 as in sources[0], got float64",
    ),
    (
        "reduce_into",
        (f4, [np.zeros(4)], SUM),
        TypeError,
        "destination: expected float64 for sources of float64, got float32",
    ),
    (
        "reduce_into",
        (np.zeros(4), [np.zeros(4, BFLOAT16)], SUM),
        TypeError,
        "destination: expected bfloat16 or float32 for sources of bfloat16, got float64",
    ),
    (
        "reduce_into",
        (shared[1:5], [shared[:4]], SUM),
        ValueError,
        "sources[0]: expected the destination's own memory or memory apart from it, got a partial overlap",
    ),
    (
        "reduce_into",
        (f4, [f4], ReduceOp.AVERAGE),
        ValueError,
        "op: expected SUM, MIN, MAX or PRODUCT, got <ReduceOp.AVERAGE: 0>",
    ),
    ("reduce_into", (f4, [f4], "sum"), ValueError, "op: expected SUM, MIN, MAX or PRODUCT, got 'sum'"),
    ("reduce_into", (f4, [f4], 1 << 80), ValueError, f"op: expected SUM, MIN, MAX or PRODUCT, got {1 << 80}"),
    ("reduce_into", (f4 > 0, [f4 > 0], SUM, 0.5), ValueError, "scale: expected 1.0 for bool arrays, got 0.5"),
    (
        "reduce_into",
        (f4 > 0, [f4 > 0], SUM, Scale(1.0, 2)),
        ValueError,
        "scale: expected 1.0 for bool arrays, got Scale(factor=1.0, divisor=2)",
    ),
    ("reduce_into", (f4, [f4], SUM, "2"), TypeError, "scale: expected a number or a Scale, got '2'"),
    ("reduce_into", (f4, [f4], SUM, (1.0, 2.5)), TypeError, "scale: expected a number or a Scale, got (1.0, 2.5)"),
    (
        "reduce_into",
        (f4, [f4], SUM, Scale(1.0, 1 << 80)),
        ValueError,
        f"scale: expected a divisor from 1 to 16777216, got {1 << 80}",
    ),
    (
        "reduce_into",
        (f4, [f4], SUM, Scale(1.0, 0)),
        ValueError,
        "scale: expected a divisor from 1 to 16777216, got 0",
    ),
    ("scale_into", (f4, f4, None), TypeError, "factor: expected a number or a Scale, got None"),
    ("scale_into", (f4 > 0, f4 > 0, 0.5), ValueError, "factor: expected 1.0 for bool arrays, got 0.5"),
    ("scale_into", (f4, f4[1:], 2.0), ValueError, "source: expected 4 elements as in destination, got 3"),
    (
        "convert_into",
        (f4, np.zeros(4, "i4")),
        TypeError,
        "source: expected float16, bfloat16, float32 or float64, got int32",
    ),
    (
        "convert_into",
        (shared, shared[:4].view(np.float16)),
        ValueError,
        "source: expected the destination's own memory or memory apart from it, got a partial overlap",
    ),
]


@needs_native
@pytest.mark.parametrize(("name", "arguments", "error", "message"), WRONG)
def test_a_wrong_argument_is_named(name, arguments, error, message):
    with pytest.raises(error, match=f"^{re.escape(f'{name}: {message}')}$"):
        getattr(native, name)(*arguments)


@pytest.mark.parametrize("kernels", BACKENDS)
def test_empty_arrays_and_read_only_sources_are_fine(kernels):
    empty = np.zeros(0, np.float32)
    kernels.reduce_into(empty, (empty, empty), SUM, 0.5)
    into = np.ones(4, np.float32)
    kernels.reduce_into(into, [read_only, into], SUM)
    assert into.tolist() == [1.0] * 4
