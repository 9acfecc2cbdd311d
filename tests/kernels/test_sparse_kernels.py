"""Selections, samples, momentum and checksums do what they say: nothing gets lost, nothing changes unseen."""

import numpy as np
import pytest

from tests.kernels.arrays import assert_same_bits, misaligned
from tests.kernels.codecs import (
    CODEC_BACKENDS,
    SIZES,
    assert_guards,
    each_finite_kind,
    floats,
    guarded,
    parts,
    selected,
)

pytestmark = pytest.mark.parametrize("kernels", CODEC_BACKENDS)


@each_finite_kind
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("share", [0.0, 0.1, 2.0])
def test_what_was_emitted_and_what_was_kept_is_exactly_what_came_in(kernels, kind, size, share):
    rng = np.random.default_rng(size)
    values, before = floats(rng, kind, size), floats(rng, kind, size)
    v, residual = values + before, before.copy()
    threshold = 0.5
    capacity = int(size * share)
    indices, picked, emitted, found = selected(kernels, values, residual, threshold, capacity)
    above = np.flatnonzero(np.abs(v) > threshold)
    assert found == above.size
    assert emitted == min(found, capacity)
    assert_same_bits(indices, above[:emitted].astype(np.uint32))
    assert not residual[indices].any()
    whole = residual.copy()
    kernels.scatter_add_into(whole, indices, picked)
    np.testing.assert_array_equal(whole, v)
    kept = np.delete(np.arange(size), indices)
    assert_same_bits(residual[kept], v[kept])


@pytest.mark.parametrize("capacity", [0, 3, 100])
@pytest.mark.parametrize("size", [40, 7])
def test_what_is_not_finite_is_emitted_and_never_stays(kernels, capacity, size):
    values, before = np.full(size, 0.5, np.float32), np.full(size, 0.25, np.float32)
    bad = [0, 2, 5] if size == 7 else [0, 2, 17, 30, 39]
    values[bad] = np.resize([np.nan, np.inf, -np.inf], len(bad))
    residual = before.copy()
    indices, picked, emitted, found = selected(kernels, values, residual, 10.0, capacity)
    assert (emitted, found) == (min(capacity, len(bad)), len(bad))
    assert indices.tolist() == bad[:emitted]
    assert not np.isfinite(picked).any()
    assert residual.tolist() == [0.25 if i in bad else 0.75 for i in range(size)]
    # Without values there is nothing that it was before.
    residual = values.copy()
    selected(kernels, None, residual, 10.0, capacity)
    assert residual.tolist() == [0.0 if i in bad else 0.5 for i in range(size)]


def test_the_threshold_itself_is_not_above_the_threshold(kernels):
    v = np.array([0.5, -0.5, np.nextafter(np.float32(0.5), np.float32(1)), 0.0], np.float32)
    assert selected(kernels, v, None, 0.5, 4)[2:] == (1, 1)
    assert selected(kernels, v, None, 0.0, 4)[2:] == (3, 3)


@pytest.mark.parametrize("density", [0.05, 0.5, 1.0])
@pytest.mark.parametrize("given_arrays", ["values", "residual", "both"])
def test_select_writes_nothing_beyond_its_capacity(kernels, density, given_arrays):
    rng = np.random.default_rng(5)
    v = np.where(rng.random(500) < density, 1.0, 0.0).astype(np.float32)
    found = int(v.sum())
    for capacity in {*range(40), *range(found - 20, found + 20)}:
        if capacity < 0:
            continue
        indices, index_memory = guarded(np.zeros(capacity, np.uint32))
        picked, picked_memory = guarded(np.zeros(capacity, np.float32))
        residual, residual_memory = guarded(v if given_arrays == "residual" else np.zeros(500, np.float32))
        inputs = {"values": (v, None), "residual": (None, residual), "both": (v, residual)}[given_arrays]
        emitted, counted = kernels.select_into(indices, picked, *inputs, 0.5)
        assert (emitted, counted) == (min(capacity, found), found)
        assert indices[:emitted].tolist() == np.flatnonzero(v)[:emitted].tolist()
        assert (picked[:emitted] == 1).all()
        assert_guards(index_memory, picked_memory, residual_memory)


@pytest.mark.parametrize(
    ("indices", "got"),
    [
        ([0, 3, 3], "3 after 3"),
        ([2, 1], "1 after 2"),
        ([10], "10"),
        ([3, 10], "10 after 3"),
        ([4, 11, 2], "11 after 4"),
    ],
)
def test_indices_that_do_not_ascend_or_are_beyond_the_end_change_nothing(kernels, indices, got):
    out = np.ones(10, np.float32)
    expected = f"^scatter_add_into: indices: expected ascending indices below 10, got {got}$"
    with pytest.raises(ValueError, match=expected):
        kernels.scatter_add_into(out, np.array(indices, np.uint32), np.ones(len(indices), np.float32))
    with pytest.raises(ValueError, match=rf"^sum_pairs_into: indices\[1\]: expected .* below 10, got {got}$"):
        kernels.sum_pairs_into(
            out,
            [np.arange(3, dtype=np.uint32), np.array(indices, np.uint32)],
            [np.ones(count, np.float32) for count in (3, len(indices))],
        )
    assert (out == 1).all()


@pytest.mark.parametrize("stride", [1, 2, 7, 64, 5000])
@pytest.mark.parametrize("size", [1, 63, 64, 65, 4099])
def test_a_sample_has_one_element_of_each_stratum(kernels, stride, size):
    values = np.arange(size, dtype=np.float32)
    sample = np.empty(parts(size, stride), np.float32)
    kernels.abs_sample_into(sample, -values, None, stride, 11)
    assert (sample.astype(int) // stride == np.arange(sample.size)).all()


def test_a_sample_is_not_biased_by_a_period_and_differs_by_seed(kernels):
    values = np.tile(np.arange(8, dtype=np.float32), 8 * 4096)
    samples = []
    for seed in (1, 2):
        sample = np.empty(parts(values.size, 64), np.float32)
        kernels.abs_sample_into(sample, values, np.ones(values.size, np.float32), 64, seed)
        samples.append(sample)
        counts = np.bincount(sample.astype(int), minlength=9)[1:]
        assert (abs(counts - 512) < 5 * np.sqrt(512)).all()
    assert (samples[0] != samples[1]).any()


def test_in_a_sample_what_is_not_finite_is_infinite(kernels):
    values = np.array([np.nan, -np.inf, np.inf, -1.0, -0.0], np.float32)
    sample = np.empty(5, np.float32)
    kernels.abs_sample_into(sample, values, None, 1, 0)
    assert sample.tolist() == [np.inf, np.inf, np.inf, 1.0, 0.0]
    assert not np.signbit(sample).any()


@pytest.mark.parametrize("nbytes", [1, 3, 4, 31, 32, 33, 96, 200])
def test_a_checksum_sees_every_flipped_bit(kernels, nbytes):
    array = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
    seen = {kernels.checksum(array)}
    for bit in range(8 * nbytes):
        array[bit // 8] ^= 1 << bit % 8
        seen.add(kernels.checksum(array))
        array[bit // 8] ^= 1 << bit % 8
    assert len(seen) == 1 + 8 * nbytes


def test_a_checksum_sees_every_two_words_that_changed_places(kernels):
    # Words that differ in the highest bit only: a difference that vanishes modulo 2**32 as soon as it is doubled.
    words = np.full(80, 5, np.uint32)
    for i in range(80):
        for j in range(i + 1, 80):
            one, other = words.copy(), words.copy()
            one[i] ^= 1 << 31
            other[j] ^= 1 << 31
            assert kernels.checksum(one) != kernels.checksum(other)


def test_a_checksum_sees_zeros_that_were_appended_and_nothing_but_bytes(kernels):
    assert len({kernels.checksum(np.zeros(n, np.uint8)) for n in range(100)}) == 100
    square = np.arange(12, dtype=np.float64).reshape(3, 4)
    assert kernels.checksum(square) == kernels.checksum(square.view(np.uint8).ravel())
    assert kernels.checksum(square) == kernels.checksum(misaligned(square.ravel(), 3))
    assert 0 <= kernels.checksum(square) < 2**64
