"""The kernels of low-rank factors in numpy: their specification and fallback.

A factor is a flat float32 array of vectors, one after the other: ``left`` has vectors as long as the matrix has rows,
``right`` as long as it has columns. Arithmetic is float32 (dot products of ``orthonormalise`` are float64), with one
rounding an operation, in an order that no processor changes: each rank computes the same factors.

Only the native code checks arguments.
"""

from __future__ import annotations

import numpy as np

from hvdkit.kernels.dtypes import Array
from hvdkit.kernels.numpy_codecs import sums_in_lanes
from hvdkit.kernels.numpy_kernels import DefaultFloats


def project_into(left: Array, matrix: Array, right: Array, rows: int, cols: int) -> None:
    """Compute ``left[k] = matrix @ right[k]``: products are added in 16 lanes, which are folded in halves.

    ``matrix`` is flat, row by row. Raises TypeError for a wrong type or dtype; ValueError for a wrong length, shape or
    overlap.
    """
    rank = max(1, left.size // rows)
    for k in range(rank):
        products = matrix.reshape(rows, cols) * right[k * cols : (k + 1) * cols]
        left[k * rows : (k + 1) * rows] = sums_in_lanes(products)


def add_and_project_into(left: Array, matrix: Array, gradient: Array, right: Array, rows: int, cols: int) -> bool:
    """Add ``gradient`` to ``matrix`` and project that as ``project_into``. Return True if the gradient is finite.

    Where it is not, ``left`` may hold anything, and ``matrix`` is as it was, but for rounding in the rows before, and
    zero where a sum there was too large.
    """
    odd = ~np.isfinite(gradient.reshape(rows, cols)).all(axis=1)
    run = slice(0, cols * (int(odd.argmax()) if odd.any() else rows))
    with np.errstate(all="ignore"), DefaultFloats():
        matrix[run] += gradient[run]
        if odd.any():
            left = matrix[run] - gradient[run]
            matrix[run] = np.where(np.isfinite(left), left, np.float32(0))
            return False
    project_into(left, matrix, right, rows, cols)
    return True


def project_back_into(right: Array, matrix: Array, left: Array, rows: int, cols: int) -> None:
    """Compute ``right[k] = matrix.T @ left[k]``, added row by row. Errors are those of ``project_into``."""
    rank = max(1, left.size // rows)
    sums = right.reshape(rank, cols)
    sums[...] = 0
    with np.errstate(all="ignore"), DefaultFloats():
        for row, factors in zip(matrix.reshape(rows, cols), left.reshape(rank, rows).T, strict=True):
            sums += factors[:, None] * row


def orthonormalise(vectors: Array, length: int) -> None:
    """Make vectors of ``length`` elements orthogonal to earlier vectors, and of norm 1 (modified Gram-Schmidt).

    A vector that depends on earlier vectors becomes zero. Raises TypeError for a wrong type or dtype, ValueError for a
    wrong length.
    """
    count = -(-vectors.size // length)
    all_vectors = vectors.reshape(count, length)
    with np.errstate(all="ignore"), DefaultFloats():
        for k, vector in enumerate(all_vectors):
            before = np.sqrt(_dot(vector, vector))
            for earlier in all_vectors[:k]:
                vector += np.float32(-_dot(earlier, vector)) * earlier
            norm = np.sqrt(_dot(vector, vector))
            vector *= np.float32(1.0 / norm if norm > 1e-6 * before and norm > 1e-30 else 0.0)


def reconstruct_into(
    out: Array | None, matrix: Array | None, left: Array, right: Array, rows: int, cols: int, scale: float = 1.0
) -> None:
    """Compute ``x = sum of outer(left[k], right[k])`` in order, ``matrix -= x`` and ``out = scale * x``.

    ``out`` and ``matrix`` may be None. Errors are those of ``project_into``.
    """
    rank = max(1, left.size // rows)
    with np.errstate(all="ignore"), DefaultFloats():
        for i, factors in enumerate(left.reshape(rank, rows).T):
            row = factors[0] * right[:cols]
            for k in range(1, rank):
                row += factors[k] * right[k * cols : (k + 1) * cols]
            row_slice = slice(i * cols, (i + 1) * cols)
            if matrix is not None:
                matrix[row_slice] -= row
            if out is not None:
                out[row_slice] = row * np.float32(scale)


def _dot(a: Array, b: Array) -> Array:
    return sums_in_lanes(a.astype(np.float64) * b.astype(np.float64))
