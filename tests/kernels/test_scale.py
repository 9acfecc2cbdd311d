"""An average is the sum divided by the size and rounded once; a factor is rounded to the type of the arithmetic."""

from fractions import Fraction

import numpy as np
import pytest

from hvdkit.kernels import ONE, ReduceOp, Scale
from hvdkit.kernels.dtypes import DTYPES, HALVES
from hvdkit.kernels.reduce_op import LARGEST_DIVISOR
from tests.kernels.arrays import BACKENDS

pytestmark = pytest.mark.parametrize("kernels", BACKENDS)
INTEGERS = pytest.mark.parametrize("dtype", [d for d in DTYPES.values() if d.kind in "iu"], ids=str)
SUM = ReduceOp.SUM


def reduced(kernels, sources, scale):
    destination = np.empty_like(sources[0])
    kernels.reduce_into(destination, sources, SUM, scale)
    return destination


def rounded(exact, dtype):
    """The nearest number of a dtype, ties to even, by comparing neighbours."""
    near = dtype(float(exact))
    around = [np.nextafter(near, dtype(-np.inf)), near, np.nextafter(near, dtype(np.inf))]
    return min(around, key=lambda x: (abs(Fraction(float(x)) - exact), int(x.view(f"u{x.itemsize}")) & 1))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 6, 7])
def test_a_float_average_is_the_quotient_of_the_sum(kernels, dtype, ranks):
    rng = np.random.default_rng(ranks)
    sources = [rng.standard_normal(999).astype(dtype) for _ in range(ranks)]
    total = reduced(kernels, sources, ONE)
    average = reduced(kernels, sources, Scale(1.0, ranks))
    np.testing.assert_array_equal(average, total / dtype(ranks))
    assert all(x == rounded(Fraction(float(t)) / ranks, dtype) for x, t in zip(average, total, strict=True))


@pytest.mark.parametrize("half", sorted(HALVES, key=str), ids=str)
def test_an_average_of_halves_is_that_of_float32_in_16_bits(kernels, half):
    rng = np.random.default_rng(3)
    sources = [rng.standard_normal(10_001).astype(half) for _ in range(3)]
    total = sources[0].astype(np.float32) + sources[1].astype(np.float32) + sources[2].astype(np.float32)
    wide = np.empty(total.size, np.float32)
    kernels.reduce_into(wide, sources, SUM, Scale(1.0, 3))
    np.testing.assert_array_equal(wide, total / np.float32(3))
    np.testing.assert_array_equal(reduced(kernels, sources, Scale(1.0, 3)), (total / np.float32(3)).astype(half))


@INTEGERS
@pytest.mark.parametrize("divisor", [2, 3, 8, 49, 200, 65537, LARGEST_DIVISOR - 1, LARGEST_DIVISOR])
def test_integer_averages_are_exact_and_cut_off(kernels, dtype, divisor):
    limits, rng = np.iinfo(dtype), np.random.default_rng(divisor)
    source = rng.integers(limits.min, limits.max, 2000, dtype, endpoint=True)
    multiples = [k * divisor + near for k in range(-40, 41) for near in (-1, 0, 1)]
    special = [limits.min, limits.max, limits.max - 1, *(x for x in multiples if limits.min <= x <= limits.max)]
    source = np.concatenate([source, np.array(special, dtype)])
    exact = [int(Fraction(int(x), divisor)) for x in source.tolist()]
    assert reduced(kernels, [source], Scale(1.0, divisor)).tolist() == exact


def test_64_bits_keep_what_a_double_cannot_hold(kernels):
    source = np.array([2**62 + 3, -(2**62) - 3, 2**53 + 1], np.int64)
    assert reduced(kernels, [source, source], Scale(1.0, 2)).tolist() == [-(2**62) + 3, 2**62 - 3, 2**53 + 1]
    assert reduced(kernels, [np.array([2**64 - 1], np.uint64)], Scale(1.0, 3)).tolist() == [(2**64 - 1) // 3]


SCALES = [Scale(1 / 3), Scale(0.1, 3), Scale(7.0, 49), Scale(1e-50, 2), Scale(2.0**127, 3), Scale(-1e300)]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("scale", SCALES)
def test_a_factor_is_rounded_to_the_type_of_a_float(kernels, dtype, scale):
    source = np.random.default_rng(4).standard_normal(5000).astype(dtype)
    with np.errstate(over="ignore"):
        expected = source * np.float64(scale.factor / scale.divisor).astype(dtype)
    np.testing.assert_array_equal(reduced(kernels, [source], scale), expected)
    into = np.empty_like(source)
    kernels.scale_into(into, source, scale)
    np.testing.assert_array_equal(into, expected)


@pytest.mark.parametrize("half", sorted(HALVES, key=str), ids=str)
@pytest.mark.parametrize("scale", SCALES[:-1])
def test_halves_are_multiplied_in_float32_and_rounded_once(kernels, half, scale):
    source = np.random.default_rng(5).standard_normal(5000).astype(half)
    with np.errstate(over="ignore"):
        expected = (source.astype(np.float32) * np.float32(scale.factor / scale.divisor)).astype(half)
        np.testing.assert_array_equal(reduced(kernels, [source], scale), expected)


@INTEGERS
def test_integers_are_multiplied_in_double_and_cut_off(kernels, dtype):
    source = np.arange(100, dtype=dtype)
    for scale in (Scale(0.7), Scale(1 / 3, 2), Scale(0.29), Scale(1.1)):
        exact = [int(x * scale.factor / scale.divisor) for x in source.tolist()]
        assert reduced(kernels, [source], scale).tolist() == exact


@pytest.mark.parametrize("scale", [Scale(1.0, 4), Scale(2.0, 8), Scale(0.5), Scale(0.1), Scale(0.7, 3), Scale(1e300)])
def test_a_scale_that_is_a_factor_says_so(kernels, scale):
    source = np.random.default_rng(6).standard_normal(100).astype(np.float32)
    factor = scale.as_factor()
    assert np.float32(factor) == factor
    np.testing.assert_array_equal(reduced(kernels, [source], factor), reduced(kernels, [source], scale))
    assert Scale(1.0, 3).as_factor() is Scale(divisor=49).as_factor() is None
