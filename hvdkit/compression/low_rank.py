"""PowerSGD: a matrix of gradients as the product of two thin ones.

Vogels et al., 2019, "PowerSGD: practical low-rank gradient compression for distributed optimization".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from hvdkit import kernels
from hvdkit.compression.codec import Array
from hvdkit.compression.lossy import LARGEST_SEED, LossyCodec, check_integer
from hvdkit.compression.state import CodecState, Key
from hvdkit.kernels import Scale

RIGHT = "right"


@dataclass(frozen=True)
class PowerSGD(LossyCodec):
    """The product of ``rank`` vectors as long as a column and as many as long as a row, by one step of power iteration.

    A tensor is a matrix whose rows are its first dimension. All of a bucket's tensors travel in two plain sums: first
    the products of each matrix and the vectors of the step before (warm start), then its products with these sums, made
    orthonormal. Tensors that this does not make smaller travel as they are. ``feedback``, ``compress`` and errors are
    those of Compression.

    Args:
        rank: the number of vectors that stand for a matrix, from 1 to 1024.
        seed: of the first vectors, from 0 to 2**32 - 1.

    Examples:
        >>> optimizer = hvd.DistributedOptimizer(optimizer, compression=hvd.Compression.powersgd(rank=4))
    """

    rank: int = 4
    seed: int = 0

    name: ClassVar[str] = "powersgd"
    whole_tensors: ClassVar[bool] = True
    needs_state: ClassVar[bool] = True
    has_device_twin: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer(self.name, "rank", self.rank, 1, 1024)
        check_integer(self.name, "seed", self.seed, 0, LARGEST_SEED)

    def vectors(self, rows: int, cols: int) -> int:
        """Return the number of vectors that stand for a matrix; 0 where they would not be smaller."""
        return self.rank if self.rank * (rows + cols) < rows * cols else 0

    def way(self, elements: int, ranks: int) -> tuple[str, str]:
        return "sums", "vectors are summed"

    def sent_bytes(self, elements: int, state: CodecState | None = None) -> int:
        return 4 * (elements if state is None else sum(self.sent_elements(state.matrices())))

    def sent_elements(self, matrices: list[tuple[int, int, int]]) -> tuple[int, int]:
        """Return the lengths of the first and the second sum."""
        first = second = 0
        for _, rows, cols in matrices:
            count = self.vectors(rows, cols)
            first += count * rows if count else rows * cols
            second += count * cols
        return first, second

    def start(self, state: CodecState, begin: int, rows: int, cols: int) -> Array:
        """Return the vectors of the last step, as long as a row; for zeros random vectors, alike on all ranks."""
        count = self.vectors(rows, cols)
        kept = state.shared.vectors.get(self.key(state, begin, rows, cols))
        right = np.zeros(count * cols, dtype=np.float32) if kept is None else kept
        for k, vector in enumerate(right.reshape(count, cols)):
            if not vector.any():
                drawn = np.random.Philox(key=self.seed, counter=[state.turn, state.begin + begin, k, 0])
                vector[...] = np.random.Generator(drawn).random(cols) - 0.5
        return right

    @staticmethod
    def key(state: CodecState, begin: int, rows: int, cols: int) -> Key:
        return RIGHT, state.begin + begin, state.begin + begin + rows * cols

    def sums(self, values: Array, scale: Scale, state: CodecState) -> Iterator[Array]:
        """Replace the tensors in ``values`` by ``scale`` times their sums over all ranks, in ``rank`` vectors.

        Yields two flat float32 vectors, of lengths that all ranks know, which the caller sums in place. Where any
        rank's gradient is not finite, the tensor becomes NaN on all ranks, which keep their state.
        """
        first, second = (np.empty(count, dtype=np.float32) for count in self.sent_elements(state.matrices()))
        matrices = self._matrices(values, state, first, second)
        for matrix in matrices:
            self._project(matrix, state)
        yield first
        finite = [bool(np.isfinite(matrix.left).all()) for matrix in matrices]
        for matrix, is_finite in zip(matrices, finite, strict=True):
            if matrix.is_product and is_finite:
                total = matrix.values if matrix.residual is None else matrix.residual
                kernels.orthonormalise(matrix.left, matrix.rows)
                kernels.project_back_into(matrix.right, total, matrix.left, matrix.rows, matrix.cols)
            else:
                matrix.right[...] = 0.0
        rights = [matrix.right.copy() for matrix in matrices]
        yield second
        for matrix, is_finite, right in zip(matrices, finite, rights, strict=True):
            if matrix.is_product:
                self._reconstruct(matrix, is_finite and bool(np.isfinite(matrix.right).all()), right, scale, state)
            else:
                kernels.scale_into(matrix.values, matrix.left, scale)

    def _matrices(self, values: Array, state: CodecState, first: Array, second: Array) -> list[_Matrix]:
        matrices = []
        for begin, rows, cols in state.matrices():
            elements = slice(begin, begin + rows * cols)
            residual = None if state.residual is None else state.residual[elements]
            lefts, rights = self.sent_elements([(begin, rows, cols)])
            matrices.append(_Matrix(values[elements], residual, rows, cols, first[:lefts], second[:rights], begin))
            first, second = first[lefts:], second[rights:]
        return matrices

    def _project(self, matrix: _Matrix, state: CodecState) -> None:
        """Write a matrix's part of the first sum."""
        if not matrix.is_product:
            matrix.left[...] = matrix.values
            return
        rows, cols = matrix.rows, matrix.cols
        with kernels.DefaultFloats():  # a rank that flushes subnormal vectors would take them for none and draw others
            start = self.start(state, matrix.begin, rows, cols)
        if matrix.residual is not None:
            matrix.finite = kernels.add_and_project_into(matrix.left, matrix.residual, matrix.values, start, rows, cols)
        else:
            matrix.finite = bool(np.isfinite(matrix.values).all())
            kernels.project_into(matrix.left, matrix.values, start, rows, cols)
        if not matrix.finite:
            matrix.left[...] = np.nan

    def _reconstruct(self, matrix: _Matrix, is_finite: bool, own: Array, scale: Scale, state: CodecState) -> None:
        """Write the result and the residual; ``own`` is this rank's part of ``matrix.right``."""
        rows, cols = matrix.rows, matrix.cols
        if not is_finite:
            if matrix.residual is not None and matrix.finite:
                matrix.residual -= matrix.values
            matrix.values[...] = np.nan
            return
        if matrix.residual is not None:
            kernels.reconstruct_into(None, matrix.residual, matrix.left, own, rows, cols)
        factor = scale.as_factor()
        sent = 1.0 if factor is None else factor
        kernels.reconstruct_into(matrix.values, None, matrix.left, matrix.right, rows, cols, sent)
        if factor is None:
            kernels.scale_into(matrix.values, matrix.values, scale)
        state.shared.vectors[self.key(state, matrix.begin, rows, cols)] = matrix.right.copy()


@dataclass
class _Matrix:
    """A tensor under way. ``left`` and ``right`` are its parts of the two sums, ``left`` all of it without vectors."""

    values: Array  # this rank's gradient, then the result
    residual: Array | None  # while under way, with the gradient if that is finite
    rows: int
    cols: int
    left: Array
    right: Array
    begin: int
    finite: bool = True  # this rank's gradient is

    @property
    def is_product(self) -> bool:
        return bool(self.right.size)
