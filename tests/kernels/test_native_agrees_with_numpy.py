"""The compiled kernels give the bits of their numpy twins, whatever the dtype, size, address and aliasing."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdkit.kernels import numpy_kernels
from hvdkit.kernels.dtypes import BFLOAT16, DTYPES, FLOATS
from hvdkit.kernels.reduce_op import LARGEST_DIVISOR, ReduceOp, Scale
from tests.kernels.arrays import KERNEL_OPS, assert_same_bits, destinations, misaligned, native, needs_native, values

pytestmark = needs_native
SUM = ReduceOp.SUM
few = settings(max_examples=25, deadline=None)

seeds = st.integers(0, 2**32 - 1)
# Around the widths of vectors, and beyond one block of the native code.
sizes = st.one_of(st.integers(0, 70), st.sampled_from([2047, 2048, 2049, 4099]))
offsets = st.integers(0, 9)
factors = st.one_of(
    st.sampled_from([1.0, 0.5, 1 / 3, 0.0, -1.5, 1e30, 1e-310, float("inf"), float("nan")]), st.floats(allow_nan=False)
)
divisors = st.one_of(st.integers(1, 200), st.sampled_from([1024, (1 << 24) - 1, LARGEST_DIVISOR]))
scales = st.one_of(
    factors, st.builds(Scale, st.just(1.0), divisors), st.builds(Scale, st.one_of(st.just(1.0), factors), divisors)
)


@pytest.mark.parametrize("op", KERNEL_OPS, ids=lambda op: op.name)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@few
@given(seed=seeds, size=sizes, count=st.integers(1, 5), offset=offsets, scale=scales)
def test_reduce_gives_the_same_bits(dtype, op, seed, size, count, offset, scale):
    rng = np.random.default_rng(seed)
    sources = [misaligned(values(rng, dtype, size), offset + k) for k in range(count)]
    scale = 1.0 if dtype == np.bool_ else scale
    for into in destinations(dtype):
        expected, got = np.empty(size, into), misaligned(np.zeros(size, into), offset)
        numpy_kernels.reduce_into(expected, sources, op, scale)
        native.reduce_into(got, sources, op, scale)
        assert_same_bits(got, expected)


@pytest.mark.parametrize("op", KERNEL_OPS, ids=lambda op: op.name)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@few
@given(seed=seeds, size=sizes, count=st.integers(1, 6), outs=st.integers(1, 4), offset=offsets, scale=scales)
def test_destinations_that_may_be_sources_get_the_same_bits(dtype, op, seed, size, count, outs, offset, scale):
    rng = np.random.default_rng(seed)
    sources = [misaligned(values(rng, dtype, size), offset + k) for k in range(count)]
    scale = 1.0 if dtype == np.bool_ else scale
    expected = np.empty(size, dtype)
    numpy_kernels.reduce_into(expected, [source.copy() for source in sources], op, scale)
    for kernels in (numpy_kernels, native):
        # As one pass over shared buffers does it: what is read is what is written.
        own = [source.copy() for source in sources]
        others = [misaligned(np.zeros(size, dtype), offset + k) for k in range(max(0, outs - count))]
        into_all = [*(own[index] for index in rng.permutation(count)[:outs]), *others]
        kernels.reduce_into(into_all if outs > 1 else into_all[0], own, op, scale)
        for into in into_all:
            assert_same_bits(into, expected)


@pytest.mark.parametrize("dtype", [d for d in DTYPES.values() if d != np.bool_], ids=str)
@few
@given(seed=seeds, size=sizes, offset=offsets, factor=scales)
def test_scale_gives_the_same_bits(dtype, seed, size, offset, factor):
    source = misaligned(values(np.random.default_rng(seed), dtype, size), offset)
    for into in destinations(dtype):
        expected, got = np.empty(size, into), np.empty(size, into)
        numpy_kernels.scale_into(expected, source, factor)
        native.scale_into(got, source, factor)
        assert_same_bits(got, expected)


@pytest.mark.parametrize("scale", [Scale(1.0, 3), Scale(1.0, 4), Scale(2.0, 4), Scale(1 / 3), Scale(1.5, 7)], ids=str)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_numbers_near_and_below_the_smallest_normal_one_are_scaled_alike(dtype, scale):
    tiny = np.finfo(dtype).tiny
    source = (np.random.default_rng(5).standard_normal(10_001) * 8).astype(dtype) * tiny
    expected, got = np.empty_like(source), np.empty_like(source)
    numpy_kernels.reduce_into(expected, [source, source], SUM, scale)
    native.reduce_into(got, [source, source], SUM, scale)
    assert_same_bits(got, expected)


@pytest.mark.parametrize("into", sorted(FLOATS, key=str), ids=str)
@pytest.mark.parametrize("dtype", sorted(FLOATS, key=str), ids=str)
@few
@given(seed=seeds, size=sizes, offset=offsets)
def test_convert_gives_the_same_bits(dtype, into, seed, size, offset):
    source = misaligned(values(np.random.default_rng(seed), dtype, size), offset)
    expected, got = np.empty(size, into), misaligned(np.zeros(size, into), offset + 1)
    numpy_kernels.convert_into(expected, source)
    native.convert_into(got, source)
    assert_same_bits(got, expected)


@pytest.mark.parametrize("half", [DTYPES["float16"], BFLOAT16], ids=str)
def test_every_half_and_every_tie_between_halves_converts_alike(half):
    halves = np.arange(1 << 16, dtype=np.uint16).view(half)
    got = np.empty(halves.size, np.float32)
    native.convert_into(got, halves)
    assert_same_bits(got, halves.astype(np.float32))
    # Every half, and one and half a last place around it: 9 lengths, so that vector and scalar code meet each of them.
    step = 1 << (12 if half == np.float16 else 15)
    words = got.view(np.uint32).astype(np.int64)
    for distance in (-step - 1, -step, -step + 1, -1, 0, 1, step - 1, step, step + 1):
        floats = (words + distance).astype(np.uint32).view(np.float32)
        with np.errstate(all="ignore"):
            expected = floats.astype(half)
        rounded = np.empty(floats.size, half)
        native.convert_into(rounded, floats)
        assert_same_bits(rounded, expected)
        for begin in range(0, 7 * 1024, 7):  # shorter than a vector: the code for processors without F16C
            native.convert_into(rounded[begin : begin + 7], floats[begin : begin + 7])
        assert_same_bits(rounded, expected)
