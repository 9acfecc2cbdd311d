"""The compiled codec kernels give the bits of their numpy twins, whatever the values, size and address."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdkit.kernels import Scale, numpy_kernels
from tests.kernels.arrays import assert_same_bits, misaligned, native, needs_native, values
from tests.kernels.codecs import KINDS, SIZES, copied, floats, parts, quantised, selected, signs, twins

pytestmark = needs_native
few = settings(max_examples=25, deadline=None)

seeds = st.integers(0, 2**32 - 1)
sizes = st.one_of(st.sampled_from(SIZES), st.integers(0, 600))
offsets = st.integers(0, 9)
factors = st.sampled_from([1.0, 0.5, 1 / 3, -2.0, 0.0, 1e30])
each_kind = pytest.mark.parametrize("kind", KINDS)
some_arrays = pytest.mark.parametrize("given_arrays", ["values", "residual", "both"])
FLOAT = np.dtype(np.float32)


def assert_same(run):
    """Check that ``run(kernels)`` returns the same arrays and numbers with both backends."""
    for got, expected in zip(run(native), run(twins), strict=True):
        if isinstance(expected, np.ndarray):
            assert_same_bits(got, expected)
        else:
            assert got == expected


@each_kind
@pytest.mark.parametrize("bits", [8, 4])
@few
@given(
    seed=seeds,
    size=sizes,
    block=st.sampled_from([16, 32, 256, 1024, 4096]),
    offset=offsets,
    rounding=st.one_of(st.none(), seeds),
    has_residual=st.booleans(),
)
def test_quantise_gives_the_same_bits(kind, bits, seed, size, block, offset, rounding, has_residual):
    rng = np.random.default_rng(seed)
    v = misaligned(floats(rng, kind, size), offset)
    before = floats(rng, kind, size) if has_residual else None

    def run(kernels):
        residual = copied(before, offset + 1)
        return [*quantised(kernels, v, residual, bits, block, rounding), residual]

    assert_same(run)


@each_kind
@few
@given(seed=seeds, size=sizes, block=st.sampled_from([512, 1024, 4096]), offset=offsets, has_residual=st.booleans())
def test_sign_gives_the_same_bits(kind, seed, size, block, offset, has_residual):
    rng = np.random.default_rng(seed)
    v = misaligned(floats(rng, kind, size), offset)
    before = floats(rng, kind, size) if has_residual else None

    def run(kernels):
        residual = copied(before, offset + 1)
        return [*signs(kernels, v, residual, block), residual]

    assert_same(run)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("bits", [8, 4, 1])
@few
@given(seed=seeds, size=sizes, block=st.sampled_from([512, 1024]), offset=offsets, factor=factors)
def test_any_bytes_and_scales_are_decoded_to_the_same_bits(bits, accumulate, seed, size, block, offset, factor):
    rng = np.random.default_rng(seed)
    codes = misaligned(rng.integers(0, 256, parts(size * bits, 8), np.uint8), offset)
    scales = misaligned(values(rng, FLOAT, parts(size, block)), offset + 1)
    before = values(rng, FLOAT, size)

    def run(kernels):
        out = misaligned(before, offset)
        if bits == 1:
            kernels.unsign_into(out, codes, scales, block, factor, accumulate)
        else:
            kernels.dequantise_into(out, codes, scales, bits, block, factor, accumulate)
        return [out]

    assert_same(run)


@few
@given(
    seed=seeds,
    size=st.one_of(sizes, st.integers(4090, 13_000)),
    offset=offsets,
    scale=st.sampled_from([1.0, 0.5, Scale(1.0, 2), Scale(1.0, 3), Scale(-0.3, 7)]),
    densities=st.lists(st.floats(0, 1), min_size=1, max_size=4),
)
def test_sum_pairs_gives_the_same_bits_and_those_of_one_by_one(seed, size, offset, scale, densities):
    rng = np.random.default_rng(seed)
    indices = [misaligned(np.flatnonzero(rng.random(size) < one).astype(np.uint32), offset) for one in densities]
    v = [misaligned(values(rng, FLOAT, one.size), offset + 1) for one in indices]
    before = values(rng, FLOAT, size)

    def run(kernels):
        out, one_by_one = misaligned(np.full(size, np.nan, np.float32), offset), np.zeros(size, np.float32)
        kernels.sum_pairs_into(out, indices, v, scale)
        for places, picked in zip(indices, v, strict=True):
            kernels.scatter_add_into(one_by_one, places, picked)
        numpy_kernels.scale_into(one_by_one, one_by_one, scale)
        assert_same_bits(out, one_by_one)
        scattered = misaligned(before, offset)
        kernels.scatter_add_into(scattered, indices[0], v[0], factor)
        return [out, scattered]

    factor = float(rng.choice([1.0, 0.5, 1 / 3, -2.0, 0.0, 1e30]))
    assert_same(run)


@each_kind
@some_arrays
@few
@given(
    seed=seeds,
    size=sizes,
    offset=offsets,
    threshold=st.sampled_from([0.0, 1e-42, 0.3, 1.0, 2.5, 1e30]),
    fraction=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    more=st.integers(0, 40),
)
def test_select_gives_the_same_bits(kind, given_arrays, seed, size, offset, threshold, fraction, more):
    rng = np.random.default_rng(seed)
    v = None if given_arrays == "residual" else misaligned(floats(rng, kind, size), offset)
    before = None if given_arrays == "values" else floats(rng, kind, size)

    def run(kernels):
        residual = copied(before, offset + 1)
        return [*selected(kernels, v, residual, threshold, int(size * fraction) + more), residual]

    assert_same(run)


@each_kind
@some_arrays
@few
@given(
    seed=seeds,
    size=sizes,
    offset=offsets,
    stride=st.one_of(st.integers(1, 70), st.sampled_from([4096, 2**31, 2**32 - 1])),
    place=seeds,
)
def test_abs_sample_gives_the_same_bits(kind, given_arrays, seed, size, offset, stride, place):
    rng = np.random.default_rng(seed)
    v = None if given_arrays == "residual" else misaligned(floats(rng, kind, size), offset)
    residual = None if given_arrays == "values" else misaligned(floats(rng, kind, size), offset + 1)

    def run(kernels):
        sample = misaligned(np.full(parts(size, stride), 7, np.float32), offset)
        kernels.abs_sample_into(sample, v, residual, stride, place)
        return [sample]

    assert_same(run)


@each_kind
@few
@given(seed=seeds, size=sizes, offset=offsets, factor=factors)
def test_momentum_gives_the_same_bits(kind, seed, size, offset, factor):
    rng = np.random.default_rng(seed)
    gradient = misaligned(floats(rng, kind, size), offset)
    before = [values(rng, FLOAT, size) for _ in range(2)]

    def run(kernels):
        arrays = [misaligned(array, offset + k) for k, array in enumerate(before)]
        return [*arrays, kernels.momentum_into(*arrays, gradient, factor)]

    assert_same(run)


@few
@given(data=st.binary(max_size=300), more=st.sampled_from([0, 4096, 262_144, 262_145]), seed=seeds, offset=offsets)
def test_checksums_are_the_same(data, more, seed, offset):
    array = misaligned(np.frombuffer(data + np.random.default_rng(seed).bytes(more), np.uint8), offset)
    assert native.checksum(array) == twins.checksum(array)
