"""The kernels do what they say, checked against float64 and integer arithmetic that shares no code with them."""

from fractions import Fraction

import numpy as np
import pytest

from hvdkit.kernels import ReduceOp
from hvdkit.kernels.dtypes import BFLOAT16, DTYPES
from tests.kernels.arrays import BACKENDS

pytestmark = pytest.mark.parametrize("kernels", BACKENDS)
HALF_DTYPES = pytest.mark.parametrize("half", [DTYPES["float16"], BFLOAT16], ids=str)


def reduced(kernels, sources, op, scale=1.0, into=None):
    destination = np.empty(sources[0].size, into or sources[0].dtype)
    kernels.reduce_into(destination, sources, op, scale)
    return destination


@HALF_DTYPES
def test_a_half_sum_is_the_float64_sum_rounded_once(kernels, half):
    # Integers below 2**20 sum without any error in float32, so that one rounding is all that may happen.
    rng = np.random.default_rng(1)
    sources = [rng.integers(-128, 128, 10_001).astype(half) for _ in range(9)]
    exact = sum(source.astype(np.float64) for source in sources)
    np.testing.assert_array_equal(reduced(kernels, sources, ReduceOp.SUM), exact.astype(half))
    np.testing.assert_array_equal(reduced(kernels, sources, ReduceOp.SUM, into=np.float32), exact)
    np.testing.assert_array_equal(reduced(kernels, sources, ReduceOp.SUM, 0.125), (exact * 0.125).astype(half))


def test_a_float16_sum_may_pass_through_what_float16_cannot_hold(kernels):
    sources = [np.array([x], np.float16) for x in (60000, 60000, -60000)]
    assert float(reduced(kernels, sources, ReduceOp.SUM)[0]) == float(np.float16(60000))
    assert float(reduced(kernels, sources[:2], ReduceOp.SUM, 0.5)[0]) == float(np.float16(60000))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_float_sums_run_in_the_order_of_the_sources(kernels, dtype):
    big = dtype(2.0) ** (np.finfo(dtype).nmant + 1)
    one, minus = np.array([1.0], dtype), np.array([-big], dtype)
    assert reduced(kernels, [np.array([big], dtype), one, minus], ReduceOp.SUM)[0] == 0.0
    assert reduced(kernels, [np.array([big], dtype), minus, one], ReduceOp.SUM)[0] == 1.0


@pytest.mark.parametrize("dtype", [d for d in DTYPES.values() if d.kind in "iu"], ids=str)
def test_integers_wrap(kernels, dtype):
    rng = np.random.default_rng(2)
    limits = np.iinfo(dtype)
    sources = [rng.integers(limits.min, limits.max, 99, dtype, endpoint=True) for _ in range(3)]
    modulus = 1 << (8 * dtype.itemsize)
    for op, exact in [
        (ReduceOp.SUM, [int(a) + int(b) + int(c) for a, b, c in zip(*sources, strict=True)]),
        (ReduceOp.PRODUCT, [int(a) * int(b) * int(c) for a, b, c in zip(*sources, strict=True)]),
    ]:
        wrapped = [(x - int(limits.min)) % modulus + int(limits.min) for x in exact]
        assert reduced(kernels, sources, op).tolist() == wrapped


@pytest.mark.parametrize("dtype", [d for d in DTYPES.values() if d.kind in "iu"], ids=str)
@pytest.mark.parametrize("scale", [0.5, 1 / 3, 0.99, -1.0])
def test_scaled_integers_are_truncated_toward_zero_and_clamped(kernels, dtype, scale):
    limits = np.iinfo(dtype)
    source = np.arange(max(limits.min, -50), 51).astype(dtype)
    exact = [int(Fraction(float(x) * scale)) for x in source.tolist()]
    assert reduced(kernels, [source], ReduceOp.SUM, scale).tolist() == [max(x, limits.min) for x in exact]
    one = np.ones(1, dtype)
    for beyond in (float(limits.max + 1), 1e30, np.inf):
        assert reduced(kernels, [one], ReduceOp.SUM, beyond).tolist() == [limits.max]
        assert reduced(kernels, [one], ReduceOp.SUM, -beyond).tolist() == [limits.min]
    assert reduced(kernels, [one], ReduceOp.SUM, np.nan).tolist() == [0]


def test_bool_is_or_and_and_and_reads_any_byte_but_zero_as_true(kernels):
    a = np.array([0, 0, 1, 200], np.uint8).view(np.bool_)
    b = np.array([0, 2, 0, 55], np.uint8).view(np.bool_)
    for op, expected in [
        (ReduceOp.SUM, [0, 1, 1, 1]),
        (ReduceOp.MAX, [0, 1, 1, 1]),
        (ReduceOp.PRODUCT, [0, 0, 0, 1]),
        (ReduceOp.MIN, [0, 0, 0, 1]),
    ]:
        assert reduced(kernels, [a, b], op).view(np.uint8).tolist() == expected
    assert reduced(kernels, [b], ReduceOp.MIN).view(np.uint8).tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_nan_wins_in_min_and_max_as_in_numpy(kernels, dtype):
    a = np.array([np.nan, 1, np.nan, -2, np.inf, 3], DTYPES[dtype])
    b = np.array([1, np.nan, np.nan, 7, -np.inf, 3], DTYPES[dtype])
    for op, function in [(ReduceOp.MIN, np.minimum), (ReduceOp.MAX, np.maximum)]:
        expected = function(a.astype(np.float64), b.astype(np.float64))
        np.testing.assert_array_equal(reduced(kernels, [a, b], op).astype(np.float64), expected)


@HALF_DTYPES
def test_float64_converts_to_a_half_with_one_rounding(kernels, half):
    # Just above a tie: a stop in float32 would fall onto the tie and then down to even.
    ulp = 2.0**-10 if half == np.float16 else 2.0**-7
    source = np.array([1 + ulp / 2 + 2.0**-40, -(1 + ulp / 2 + 2.0**-40), 1 + ulp / 2, 1e300, -1e300, 1e-300])
    got = np.empty(source.size, half)
    kernels.convert_into(got, source)
    assert got.astype(np.float64).tolist() == [1 + ulp, -1 - ulp, 1.0, np.inf, -np.inf, 0.0]
