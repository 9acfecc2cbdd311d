"""PowerSGD: a matrix of gradients as the product of two thin ones.

Vogels et al., 2019, "PowerSGD: practical low-rank gradient compression for distributed optimization".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from hvdkit import kernels
from hvdkit.compression.checks import check_integer, check_seed
from hvdkit.compression.codec import Array
from hvdkit.compression.lossy import LinearCodec
from hvdkit.compression.state import CodecState, Key
from hvdkit.kernels import Scale

RIGHT = "right"


@dataclass(frozen=True)
class PowerSGD(LinearCodec):
    """The product of ``rank`` vectors as long as a column and as many as long as a row, by one step of power iteration.

    A tensor is a matrix whose rows are its first dimension. All of a bucket's tensors travel together: first what each
    matrix is on the vectors of the step before (warm start), then, those made orthonormal, what it is on these. Both
    are plain sums. Tensors that this does not make smaller travel as they are, with the first. The arguments
    ``feedback`` and ``compress`` are those of Compression, as are errors.

    Args:
        rank: how many vectors stand for a matrix, from 1 to 1024.
        seed: of the vectors to begin with, from 0 to 2**32 - 1.

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
        check_seed(self.name, self.seed)

    def vectors(self, rows: int, cols: int) -> int:
        """How many vectors stand for a matrix; 0 where they would not be smaller."""
        return self.rank if self.rank * (rows + cols) < rows * cols else 0

    def sent_bytes(self, elements: int, state: CodecState | None = None) -> int:
        """Of all vectors; of the elements themselves where it is not told what tensors they are."""
        return 4 * (elements if state is None else sum(self.sent_elements(state.matrices())))

    def sent_elements(self, matrices: list[tuple[int, int, int]]) -> tuple[int, int]:
        """How many numbers travel the first and the second time."""
        first = second = 0
        for _, rows, cols in matrices:
            count = self.vectors(rows, cols)
            first += count * rows if count else rows * cols
            second += count * cols
        return first, second

    def start(self, state: CodecState, begin: int, rows: int, cols: int) -> Array:
        """The vectors as long as a row to begin with: the last step's; random ones, alike on all ranks, for zeros."""
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
        """Where the vectors of a matrix are kept."""
        return RIGHT, state.begin + begin, state.begin + begin + rows * cols

    def sums(self, values: Array, scale: Scale, state: CodecState) -> Iterator[Array]:
        """Replace the tensors in ``values`` by ``scale`` times their sums over all ranks, as far as ``rank`` goes.

        Of each tensor what the result lacks is kept: what this rank's matrix is beyond the vectors that all agreed on.
        Where any rank's gradient is not finite, the tensor becomes NaN on all ranks, and all keep what they kept
        before, but for rounding.
        """
        first, second = (np.empty(count, dtype=np.float32) for count in self.sent_elements(state.matrices()))
        matrices = self._matrices(values, state, first, second)
        for one in matrices:
            self._project(one, state)
        yield first
        finite = [bool(np.isfinite(one.left).all()) for one in matrices]
        for one, good in zip(matrices, finite, strict=True):
            if one.is_product and good:
                kernels.orthonormalise(one.left, one.rows)
                kernels.project_back_into(one.right, one.matrix, one.left, one.rows, one.cols)
            else:
                one.right[...] = 0.0
        own = [one.right.copy() for one in matrices]
        yield second
        for one, good, mine in zip(matrices, finite, own, strict=True):
            if one.is_product:
                self._reconstruct(one, good and bool(np.isfinite(one.right).all()), mine, scale, state)
            else:
                kernels.scale_into(one.values, one.left, scale)

    def _matrices(self, values: Array, state: CodecState, first: Array, second: Array) -> list[_Matrix]:
        matrices = []
        left = right = 0
        for begin, rows, cols in state.matrices():
            count, elements = self.vectors(rows, cols), slice(begin, begin + rows * cols)
            lefts, rights = (count * rows if count else rows * cols), count * cols
            mine = values[elements]
            residual = None if state.residual is None else state.residual[elements]
            ends = first[left : left + lefts], second[right : right + rights]
            matrices.append(_Matrix(mine, residual, rows, cols, *ends, begin))
            left, right = left + lefts, right + rights
        return matrices

    def _project(self, one: _Matrix, state: CodecState) -> None:
        """What travels first."""
        if not one.is_product:
            one.left[...] = one.values
            return
        with kernels.DefaultFloats():  # who flushes subnormal vectors would take them for none and draw others
            start = self.start(state, one.begin, one.rows, one.cols)
        if one.residual is not None:
            one.finite = kernels.add_and_project_into(one.left, one.residual, one.values, start, one.rows, one.cols)
        else:
            one.finite = bool(np.isfinite(one.values).all())
            kernels.project_into(one.left, one.values, start, one.rows, one.cols)
        if not one.finite:
            one.left[...] = np.nan

    def _reconstruct(self, one: _Matrix, good: bool, mine: Array, scale: Scale, state: CodecState) -> None:
        """The result, and what is kept; ``mine`` is this rank's part of ``one.right``."""
        if not good:
            if one.residual is not None and one.finite:
                one.residual -= one.values
            one.values[...] = np.nan
            return
        if one.residual is not None:
            kernels.reconstruct_into(None, one.residual, one.left, mine, one.rows, one.cols)
        factor = scale.as_factor()
        known = 1.0 if factor is None else factor
        kernels.reconstruct_into(one.values, None, one.left, one.right, one.rows, one.cols, known)
        if factor is None:
            kernels.scale_into(one.values, one.values, scale)
        state.shared.vectors[self.key(state, one.begin, one.rows, one.cols)] = one.right.copy()


@dataclass
class _Matrix:
    """A tensor under way. ``left`` and ``right`` are runs of what travels; without vectors ``left`` is all of it."""

    values: Array  # this rank's gradient, then the result
    residual: Array | None  # under way with the gradient in it, if that is finite
    rows: int
    cols: int
    left: Array
    right: Array
    begin: int
    finite: bool = True  # whether this rank's gradient is

    @property
    def matrix(self) -> Array:
        """What the vectors are to stand for: the gradient and what was kept of earlier ones."""
        return self.values if self.residual is None else self.residual

    @property
    def is_product(self) -> bool:
        return bool(self.right.size)
