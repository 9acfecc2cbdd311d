"""Quantised and signed values are what they stand for: what is sent and what stays is what came in."""

import numpy as np
import pytest

from tests.kernels.arrays import assert_same_bits
from tests.kernels.codecs import (
    CODEC_BACKENDS,
    LARGEST,
    SIZES,
    assert_guards,
    dequantised,
    each_finite_kind,
    floats,
    guarded,
    parts,
    quantised,
    signs,
)

pytestmark = pytest.mark.parametrize("kernels", CODEC_BACKENDS)
each_bits = pytest.mark.parametrize("bits", [8, 4])


@each_finite_kind
@each_bits
@pytest.mark.parametrize("seed", [None, 7])
@pytest.mark.parametrize("size", SIZES)
def test_decoded_and_residual_are_what_was_quantised(kernels, kind, bits, seed, size):
    rng = np.random.default_rng(size)
    values, before, block = floats(rng, kind, size), floats(rng, kind, size), 256
    v, residual = values + before, before.copy()
    codes, scales = quantised(kernels, values, residual, bits, block, seed)
    decoded = dequantised(kernels, codes, scales, size, bits, block)
    assert_same_bits(residual, v - decoded)
    # One grid step at most, half of one to nearest; and a hair for the roundings of scale and inverse.
    step = np.repeat(scales, block)[:size] * (1.0 if seed is not None else 0.5) * (1 + 1e-4)
    assert (np.abs(residual) <= np.where(step > 0, step, np.abs(v))).all()
    small = np.repeat(scales, block)[:size] == 0
    assert_same_bits(residual[small], v[small])


@each_bits
def test_quantised_codes_stand_where_the_format_says(kernels, bits):
    limit = 127 if bits == 8 else 7
    values = np.zeros(35, np.float32)
    values[[0, 1, 2, 16, 34]] = limit, -limit, 2.5, -3.0, 1.0
    codes, scales = quantised(kernels, values, None, bits, 16)
    assert scales.tolist() == [1.0, np.float32(3) / np.float32(limit), np.float32(1) / np.float32(limit)]
    if bits == 8:
        assert codes.view(np.int8).tolist() == [127, -127, 2] + [0] * 13 + [-127] + [0] * 17 + [127]
    else:
        expected = [15 | 1 << 4, 10 | 8 << 4] + [0x88] * 6 + [1 | 8 << 4] + [0x88] * 8 + [15 | 8 << 4]
        assert codes.tolist() == expected


@each_bits
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf, LARGEST])
@pytest.mark.parametrize("index", [0, 20, 31])
def test_a_block_that_is_not_finite_is_sent_as_nan_and_its_residual_stays(kernels, bits, bad, index):
    values, before = np.linspace(-1, 1, 70, dtype=np.float32), np.full(70, 0.25, np.float32)
    values[index] = bad
    if bad == LARGEST:  # of which the sum overflows
        before[index] = bad
    block, residual = 16, before.copy()
    codes, scales = quantised(kernels, values, residual, bits, block)
    hit = index // block
    assert scales.view(np.uint32)[hit] == 0x7FC00000
    assert np.isfinite(np.delete(scales, hit)).all()
    inside = slice(hit * block, (hit + 1) * block)
    assert_same_bits(residual[inside], before[inside])
    decoded = dequantised(kernels, codes, scales, values.size, bits, block)
    assert np.isnan(decoded[inside]).all()
    assert np.isfinite(np.delete(decoded, np.r_[inside])).all()
    zero = 0 if bits == 8 else 0x88
    assert (codes[inside.start * bits // 8 : inside.stop * bits // 8] == zero).all()


@each_bits
def test_what_is_sent_of_the_largest_numbers_is_finite_or_nan_but_never_infinite(kernels, bits):
    largest = np.float32(LARGEST).view(np.uint32)
    values = np.zeros((200, 16), np.float32)
    values[:, 3] = (largest - np.arange(200, dtype=np.uint32)).view(np.float32)
    residual = np.zeros(values.size, np.float32)
    codes, scales = quantised(kernels, values.ravel(), residual, bits, 16)
    assert not np.isinf(dequantised(kernels, codes, scales, values.size, bits, 16)).any()
    assert np.isfinite(residual).all()


@each_bits
def test_a_scale_below_the_normal_numbers_sends_nothing(kernels, bits):
    limit, tiny = (127 if bits == 8 else 7), float(np.finfo(np.float32).tiny)
    below, from_there = np.float32(limit * tiny * 0.999), np.float32(limit * tiny)
    values = np.repeat(np.array([below, from_there], np.float32), 16)
    residual = np.zeros(32, np.float32)
    codes, scales = quantised(kernels, values, residual, bits, 16)
    assert scales.tolist() == [0.0, tiny]
    assert residual.tolist() == [below] * 16 + [0.0] * 16
    assert dequantised(kernels, codes, scales, 32, bits, 16).tolist() == [0.0] * 16 + [float(from_there)] * 16


@each_bits
@pytest.mark.parametrize("level", [0.0, 0.1, -2.3, 2.5, 6.9])
def test_stochastic_rounding_is_right_on_average(kernels, bits, level):
    count, limit = 1 << 17, 127 if bits == 8 else 7
    values = np.full(count, level, np.float32)
    values[::512] = limit  # so that the scale is 1
    codes, scales = quantised(kernels, values, None, bits, 512, 12345)
    assert (scales == 1).all()
    other_codes, _ = quantised(kernels, values, None, bits, 512, 12346)
    assert (codes != other_codes).any() == (level != 0.0)
    decoded = np.delete(dequantised(kernels, codes, scales, count, bits, 512), np.s_[::512])
    assert set(decoded.tolist()) <= {np.floor(level), np.ceil(level)}
    assert abs(decoded.astype(np.float64).mean() - level) <= 5 * 0.5 / np.sqrt(decoded.size)


@each_bits
def test_a_scale_is_multiplied_and_what_was_there_is_added_to(kernels, bits):
    values = np.random.default_rng(1).standard_normal(100).astype(np.float32)
    codes, scales = quantised(kernels, values, None, bits, 32)
    decoded = dequantised(kernels, codes, scales, 100, bits, 32)
    out = np.ones(100, np.float32)
    kernels.dequantise_into(out, codes, scales, bits, 32, 0.25, accumulate=True)
    assert_same_bits(out, 1 + decoded * np.float32(0.25))


@each_finite_kind
@pytest.mark.parametrize("size", SIZES)
def test_decoded_and_residual_are_what_was_signed(kernels, kind, size):
    rng = np.random.default_rng(size)
    values, before, block = floats(rng, kind, size), floats(rng, kind, size), 512
    v, residual = values + before, before.copy()
    packed, scales = signs(kernels, values, residual, block)
    decoded = np.empty(size, np.float32)
    kernels.unsign_into(decoded, packed, scales, block)
    assert_same_bits(residual, v - decoded)
    assert_same_bits(np.signbit(decoded), np.signbit(v))
    mean = [np.abs(v[begin : begin + block].astype(np.float64)).mean() for begin in range(0, size, block)]
    np.testing.assert_allclose(scales, mean, rtol=1e-5, atol=1e-45)
    bits = np.unpackbits(packed, bitorder="little")
    assert not bits[size:].any()
    out = np.ones(size, np.float32)
    kernels.unsign_into(out, packed, scales, block, 0.25, accumulate=True)
    assert_same_bits(out, 1 + decoded * np.float32(0.25))


@pytest.mark.parametrize("bad", [[np.nan], [np.inf], [-np.inf], [LARGEST, LARGEST]])
def test_a_sign_block_that_is_not_finite_is_sent_as_nan_and_its_residual_stays(kernels, bad):
    values, before = np.ones(1200, np.float32), np.full(1200, 0.25, np.float32)
    values[600 : 600 + len(bad)] = bad
    residual = before.copy()
    packed, scales = signs(kernels, values, residual, 512)
    assert scales.view(np.uint32)[1] == 0x7FC00000
    assert scales[[0, 2]].tolist() == [1.25, 1.25]
    assert not packed[64:128].any()
    assert_same_bits(residual[512:1024], before[512:1024])
    out = np.empty(1200, np.float32)
    kernels.unsign_into(out, packed, scales, 512)
    assert np.isnan(out[512:1024]).all()
    assert np.isfinite(out[:512]).all()


@pytest.mark.parametrize("size", SIZES)
def test_nothing_is_written_beside_the_arrays(kernels, size):
    values = np.random.default_rng(size).standard_normal(size).astype(np.float32)
    residual, residual_memory = guarded(values)
    out, out_memory = guarded(values)
    sample, sample_memory = guarded(np.zeros(parts(size, 7), np.float32))
    kernels.abs_sample_into(sample, values, None, 7, 1)
    kernels.momentum_into(residual, out, values, 0.9)
    assert_guards(sample_memory)
    for bits in (8, 4, 1):
        codes, codes_memory = guarded(np.zeros(parts(size * bits, 8), np.uint8))
        scales, scales_memory = guarded(np.zeros(parts(size, 512), np.float32))
        if bits == 1:
            kernels.sign_into(codes, scales, values, residual, 512)
            kernels.unsign_into(out, codes, scales, 512)
        else:
            kernels.quantise_into(codes, scales, values, residual, bits, 512, 3)
            kernels.dequantise_into(out, codes, scales, bits, 512)
        assert_guards(codes_memory, scales_memory, residual_memory, out_memory)
