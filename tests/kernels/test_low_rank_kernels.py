"""Low-rank factors: what the products are, and that native and numpy kernels give the same bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.kernels.arrays import native, needs_native
from tests.kernels.codecs import CODEC_BACKENDS, twins

SHAPES = [(1, 1, 1), (1, 40, 1), (40, 1, 1), (5, 17, 2), (33, 48, 4), (100, 70, 5), (64, 1100, 7), (3, 530, 3)]
each_backend = pytest.mark.parametrize("kernels", CODEC_BACKENDS)
each_shape = pytest.mark.parametrize(("rows", "cols", "rank"), SHAPES)


def matrix_of(rows: int, cols: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(rows * cols).astype(np.float32)


def steps(kernels: Any, rows: int, cols: int, rank: int) -> list[np.ndarray]:
    """One step of power iteration: left, right, result, and what is left of the matrix."""
    matrix, right = matrix_of(rows, cols), matrix_of(rank, cols, 1)
    left, result = np.empty(rank * rows, np.float32), np.empty(rows * cols, np.float32)
    kernels.project_into(left, matrix, right, rows, cols)
    kernels.orthonormalise(left, rows)
    kernels.project_back_into(right, matrix, left, rows, cols)
    kernels.reconstruct_into(result, matrix, left, right, rows, cols, 0.5)
    return [left, right, result, matrix]


@needs_native
@each_shape
def test_both_give_the_same_bits_and_result_and_rest_are_the_matrix(rows, cols, rank):
    of_both = [steps(kernels, rows, cols, rank) for kernels in (native, twins)]
    for got, expected in zip(*of_both, strict=True):
        assert got.tobytes() == expected.tobytes()
    _, _, result, rest = of_both[1]
    np.testing.assert_allclose(2 * result + rest, matrix_of(rows, cols), rtol=0, atol=1e-5)
    assert np.linalg.norm(rest) <= np.linalg.norm(matrix_of(rows, cols)) * 1.0001


@needs_native
@pytest.mark.parametrize("odd", [None, (0, np.nan), (700, np.inf), (-1, -np.inf)])
@each_shape
def test_what_is_added_has_the_same_bits_and_those_of_two_passes(rows, cols, rank, odd):
    results = []
    for kernels in (native, twins):
        added, gradient, left = matrix_of(rows, cols), matrix_of(rows, cols, 2), np.zeros(rank * rows, np.float32)
        if odd is not None:
            gradient[odd[0] % gradient.size] = odd[1]
        finite = kernels.add_and_project_into(left, added, gradient, matrix_of(rank, cols, 1), rows, cols)
        assert finite == (odd is None)
        results.append((added.tobytes(), left.tobytes() if finite else None))
    assert results[0] == results[1]
    if odd is not None:
        np.testing.assert_allclose(added, matrix_of(rows, cols), rtol=0, atol=1e-6)
        return
    left, matrix = np.empty(rank * rows, np.float32), matrix_of(rows, cols) + matrix_of(rows, cols, 2)
    native.project_into(left, matrix, matrix_of(rank, cols, 1), rows, cols)
    assert results[0] == (matrix.tobytes(), left.tobytes())


@each_backend
def test_sums_that_were_too_large_are_forgotten_where_the_gradient_is_not_finite(kernels):
    matrix, gradient = np.full(8, 3e38, np.float32), np.full(8, 3e38, np.float32)
    gradient[7] = np.nan
    assert not kernels.add_and_project_into(np.zeros(2, np.float32), matrix, gradient, np.ones(4, np.float32), 2, 4)
    np.testing.assert_array_equal(matrix, np.array([0, 0, 0, 0, *[3e38] * 4], np.float32))


@each_backend
@each_shape
def test_products_are_those_of_float64(kernels, rows, cols, rank):
    matrix, right = matrix_of(rows, cols), matrix_of(rank, cols, 1)
    left = np.empty(rank * rows, np.float32)
    kernels.project_into(left, matrix, right, rows, cols)
    wide = matrix.reshape(rows, cols).astype(np.float64)
    expected = right.reshape(rank, cols).astype(np.float64) @ wide.T
    np.testing.assert_allclose(left.reshape(rank, rows), expected, rtol=0, atol=1e-5 * (1 + np.abs(expected).max()))
    kernels.project_back_into(right, matrix, left, rows, cols)
    expected = left.reshape(rank, rows).astype(np.float64) @ wide
    np.testing.assert_allclose(right.reshape(rank, cols), expected, rtol=0, atol=1e-5 * (1 + np.abs(expected).max()))


@each_backend
def test_vectors_become_orthonormal_and_dependent_ones_zero(kernels):
    vectors = matrix_of(5, 100).reshape(5, 100)
    vectors[2] = 3 * vectors[0] - vectors[1]
    vectors[4] = 0
    kernels.orthonormalise(vectors.reshape(-1), 100)
    expected = np.diag([1.0, 1.0, 0.0, 1.0, 0.0])
    np.testing.assert_allclose(vectors @ vectors.T, expected, rtol=0, atol=1e-5)


@each_backend
def test_what_is_not_finite_stays_so(kernels):
    for odd in (np.nan, np.inf):
        matrix, right, left = matrix_of(4, 40), matrix_of(2, 40, 1), np.empty(8, np.float32)
        matrix[45] = odd
        kernels.project_into(left, matrix, right, 4, 40)
        assert not np.isfinite(left.reshape(2, 4)[:, 1]).any()
        assert np.isfinite(left.reshape(2, 4)[:, [0, 2, 3]]).all()
