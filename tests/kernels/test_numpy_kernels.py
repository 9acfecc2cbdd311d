"""The kernels do what they say, checked against float64 and integer arithmetic that shares no code with them."""

from fractions import Fraction

import numpy as np
import pytest

from hvdkit.kernels import ONE, ReduceOp, Scale
from hvdkit.kernels.dtypes import BFLOAT16, DTYPES
from hvdkit.kernels.reduce_op import LARGEST_DIVISOR
from tests.kernels.arrays import BACKENDS, reduced

SUM = ReduceOp.SUM
pytestmark = pytest.mark.parametrize("kernels", BACKENDS)
each_half = pytest.mark.parametrize("half", [DTYPES["float16"], BFLOAT16], ids=str)
each_integer = pytest.mark.parametrize("dtype", [d for d in DTYPES.values() if d.kind in "iu"], ids=str)
each_wide_float = pytest.mark.parametrize("dtype", [np.float32, np.float64])


@each_half
def test_a_half_sum_is_the_float64_sum_rounded_once(kernels, half):
    # Integers below 2**20 sum without any error in float32, so that one rounding is all that may happen.
    rng = np.random.default_rng(1)
    sources = [rng.integers(-128, 128, 10_001).astype(half) for _ in range(9)]
    exact = sum(source.astype(np.float64) for source in sources)
    np.testing.assert_array_equal(reduced(kernels, sources, SUM), exact.astype(half))
    np.testing.assert_array_equal(reduced(kernels, sources, SUM, into=np.float32), exact)
    np.testing.assert_array_equal(reduced(kernels, sources, SUM, 0.125), (exact * 0.125).astype(half))


def test_a_float16_sum_may_pass_through_what_float16_cannot_hold(kernels):
    sources = [np.array([x], np.float16) for x in (60000, 60000, -60000)]
    assert float(reduced(kernels, sources, SUM)[0]) == float(np.float16(60000))
    assert float(reduced(kernels, sources[:2], SUM, 0.5)[0]) == float(np.float16(60000))


@each_wide_float
def test_float_sums_run_in_the_order_of_the_sources(kernels, dtype):
    big = dtype(2.0) ** (np.finfo(dtype).nmant + 1)
    one, minus = np.array([1.0], dtype), np.array([-big], dtype)
    assert reduced(kernels, [np.array([big], dtype), one, minus], SUM)[0] == 0.0
    assert reduced(kernels, [np.array([big], dtype), minus, one], SUM)[0] == 1.0


@each_integer
def test_integers_wrap(kernels, dtype):
    rng = np.random.default_rng(2)
    limits = np.iinfo(dtype)
    sources = [rng.integers(limits.min, limits.max, 99, dtype, endpoint=True) for _ in range(3)]
    modulus = 1 << (8 * dtype.itemsize)
    for op, exact in [
        (SUM, [int(a) + int(b) + int(c) for a, b, c in zip(*sources, strict=True)]),
        (ReduceOp.PRODUCT, [int(a) * int(b) * int(c) for a, b, c in zip(*sources, strict=True)]),
    ]:
        wrapped = [(x - int(limits.min)) % modulus + int(limits.min) for x in exact]
        assert reduced(kernels, sources, op).tolist() == wrapped


@each_integer
@pytest.mark.parametrize("scale", [0.5, 1 / 3, 0.99, -1.0])
def test_scaled_integers_are_truncated_toward_zero_and_clamped(kernels, dtype, scale):
    limits = np.iinfo(dtype)
    source = np.arange(max(limits.min, -50), 51).astype(dtype)
    exact = [int(Fraction(float(x) * scale)) for x in source.tolist()]
    assert reduced(kernels, [source], SUM, scale).tolist() == [max(x, limits.min) for x in exact]
    one = np.ones(1, dtype)
    for beyond in (float(limits.max + 1), 1e30, np.inf):
        assert reduced(kernels, [one], SUM, beyond).tolist() == [limits.max]
        assert reduced(kernels, [one], SUM, -beyond).tolist() == [limits.min]
    assert reduced(kernels, [one], SUM, np.nan).tolist() == [0]


def test_bool_is_or_and_and_and_reads_any_byte_but_zero_as_true(kernels):
    a = np.array([0, 0, 1, 200], np.uint8).view(np.bool_)
    b = np.array([0, 2, 0, 55], np.uint8).view(np.bool_)
    for op, expected in [
        (SUM, [0, 1, 1, 1]),
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


@each_half
def test_float64_converts_to_a_half_with_one_rounding(kernels, half):
    # Just above a tie: a stop in float32 would fall onto the tie and then down to even.
    ulp = 2.0**-10 if half == np.float16 else 2.0**-7
    source = np.array([1 + ulp / 2 + 2.0**-40, -(1 + ulp / 2 + 2.0**-40), 1 + ulp / 2, 1e300, -1e300, 1e-300])
    got = np.empty(source.size, half)
    kernels.convert_into(got, source)
    assert got.astype(np.float64).tolist() == [1 + ulp, -1 - ulp, 1.0, np.inf, -np.inf, 0.0]


# -- averages and factors: each result is rounded once, a factor to the type of the arithmetic -------------------------


def rounded(exact, dtype):
    """The nearest number of a dtype, ties to even, by comparing neighbours."""
    near = dtype(float(exact))
    around = [np.nextafter(near, dtype(-np.inf)), near, np.nextafter(near, dtype(np.inf))]
    return min(around, key=lambda x: (abs(Fraction(float(x)) - exact), int(x.view(f"u{x.itemsize}")) & 1))


@each_wide_float
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 6, 7])
def test_a_float_average_is_the_quotient_of_the_sum(kernels, dtype, ranks):
    rng = np.random.default_rng(ranks)
    sources = [rng.standard_normal(999).astype(dtype) for _ in range(ranks)]
    total = reduced(kernels, sources, SUM, ONE)
    average = reduced(kernels, sources, SUM, Scale(1.0, ranks))
    np.testing.assert_array_equal(average, total / dtype(ranks))
    assert all(x == rounded(Fraction(float(t)) / ranks, dtype) for x, t in zip(average, total, strict=True))


@each_half
def test_an_average_of_halves_is_that_of_float32_in_16_bits(kernels, half):
    rng = np.random.default_rng(3)
    sources = [rng.standard_normal(10_001).astype(half) for _ in range(3)]
    total = sources[0].astype(np.float32) + sources[1].astype(np.float32) + sources[2].astype(np.float32)
    wide = reduced(kernels, sources, SUM, Scale(1.0, 3), np.float32)
    np.testing.assert_array_equal(wide, total / np.float32(3))
    np.testing.assert_array_equal(reduced(kernels, sources, SUM, Scale(1.0, 3)), (total / np.float32(3)).astype(half))


@each_integer
@pytest.mark.parametrize("divisor", [2, 3, 8, 49, 200, 65537, LARGEST_DIVISOR - 1, LARGEST_DIVISOR])
def test_integer_averages_are_exact_and_cut_off(kernels, dtype, divisor):
    limits, rng = np.iinfo(dtype), np.random.default_rng(divisor)
    source = rng.integers(limits.min, limits.max, 2000, dtype, endpoint=True)
    multiples = [k * divisor + near for k in range(-40, 41) for near in (-1, 0, 1)]
    special = [limits.min, limits.max, limits.max - 1, *(x for x in multiples if limits.min <= x <= limits.max)]
    source = np.concatenate([source, np.array(special, dtype)])
    exact = [int(Fraction(int(x), divisor)) for x in source.tolist()]
    assert reduced(kernels, [source], SUM, Scale(1.0, divisor)).tolist() == exact


def test_64_bits_keep_what_a_double_cannot_hold(kernels):
    source = np.array([2**62 + 3, -(2**62) - 3, 2**53 + 1], np.int64)
    assert reduced(kernels, [source, source], SUM, Scale(1.0, 2)).tolist() == [-(2**62) + 3, 2**62 - 3, 2**53 + 1]
    assert reduced(kernels, [np.array([2**64 - 1], np.uint64)], SUM, Scale(1.0, 3)).tolist() == [(2**64 - 1) // 3]


SCALES = [Scale(1 / 3), Scale(0.1, 3), Scale(7.0, 49), Scale(1e-50, 2), Scale(2.0**127, 3), Scale(-1e300)]


@each_wide_float
@pytest.mark.parametrize("scale", SCALES)
def test_a_factor_is_rounded_to_the_type_of_a_float(kernels, dtype, scale):
    source = np.random.default_rng(4).standard_normal(5000).astype(dtype)
    with np.errstate(over="ignore"):
        expected = source * np.float64(scale.factor / scale.divisor).astype(dtype)
    np.testing.assert_array_equal(reduced(kernels, [source], SUM, scale), expected)
    into = np.empty_like(source)
    kernels.scale_into(into, source, scale)
    np.testing.assert_array_equal(into, expected)


@each_half
@pytest.mark.parametrize("scale", SCALES[:-1])
def test_halves_are_multiplied_in_float32_and_rounded_once(kernels, half, scale):
    source = np.random.default_rng(5).standard_normal(5000).astype(half)
    with np.errstate(over="ignore"):
        expected = (source.astype(np.float32) * np.float32(scale.factor / scale.divisor)).astype(half)
        np.testing.assert_array_equal(reduced(kernels, [source], SUM, scale), expected)


@each_integer
def test_integers_are_multiplied_in_double_and_cut_off(kernels, dtype):
    source = np.arange(100, dtype=dtype)
    for scale in (Scale(0.7), Scale(1 / 3, 2), Scale(0.29), Scale(1.1)):
        exact = [int(x * scale.factor / scale.divisor) for x in source.tolist()]
        assert reduced(kernels, [source], SUM, scale).tolist() == exact


@pytest.mark.parametrize("scale", [Scale(1.0, 4), Scale(2.0, 8), Scale(0.5), Scale(0.1), Scale(0.7, 3), Scale(1e300)])
def test_a_scale_that_is_a_factor_says_so(kernels, scale):
    source = np.random.default_rng(6).standard_normal(100).astype(np.float32)
    factor = scale.as_factor()
    assert np.float32(factor) == factor
    np.testing.assert_array_equal(reduced(kernels, [source], SUM, factor), reduced(kernels, [source], SUM, scale))
    assert Scale(1.0, 3).as_factor() is Scale(divisor=49).as_factor() is None
