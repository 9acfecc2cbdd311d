"""Allreduce of matrices as products of thin ones: two plain sums of vectors, and arithmetic that all ranks do alike."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter

import numpy as np

from hvdkit import kernels
from hvdkit.collectives.allreduce import allreduce
from hvdkit.collectives.group import Array, Group, Steps
from hvdkit.compression import CASTS, Memory, PowerSGD
from hvdkit.kernels import ONE, ReduceOp, Scale


@dataclass
class _Matrix:
    """A tensor under way. ``left`` and ``right`` are runs of what travels; without vectors ``left`` is all of it."""

    values: Array  # this rank's gradient, then the result
    residual: Array | None  # under way with the gradient in it, if that is finite
    rows: int
    cols: int
    left: Array
    right: Array
    finite: bool  # whether this rank's gradient is
    begin: int

    @property
    def matrix(self) -> Array:
        """What the vectors are to stand for: the gradient and what was kept of earlier ones."""
        return self.values if self.residual is None else self.residual

    @property
    def is_product(self) -> bool:
        return bool(self.right.size)


def low_rank_allreduce(
    group: Group, values: Array, scale: Scale, codec: PowerSGD, tag: int, memory: Memory
) -> Steps[None]:
    """Replace the tensors in ``values`` by ``scale`` times their sums over all ranks, as far as ``codec.rank`` goes.

    ``values`` is flat float32; ``memory`` says where its tensors are. Uses ``tag`` up to ``tag + 3``. Of each tensor
    what the result lacks is kept: what this rank's matrix is beyond the vectors that all agreed on. Where any rank's
    gradient is not finite, the tensor becomes NaN on all ranks, and all keep what they kept before, but for rounding.
    """
    started = perf_counter()
    first, second = (np.empty(count, dtype=np.float32) for count in codec.sent_elements(memory.matrices()))
    matrices = list(_matrices(values, codec, memory, first, second))
    for one in matrices:
        _project(one, codec, memory)
    memory.tally.encode_seconds += perf_counter() - started
    yield from allreduce(group, first, ReduceOp.SUM, ONE, CASTS["none"], tag)
    started = perf_counter()
    finite = [bool(np.isfinite(one.left).all()) for one in matrices]
    for one, good in zip(matrices, finite, strict=True):
        if one.is_product and good:
            kernels.orthonormalise(one.left, one.rows)
            kernels.project_back_into(one.right, one.matrix, one.left, one.rows, one.cols)
        else:
            one.right[...] = 0.0
    own = [one.right.copy() for one in matrices]
    memory.tally.encode_seconds += perf_counter() - started
    yield from allreduce(group, second, ReduceOp.SUM, ONE, CASTS["none"], tag + 2)
    started = perf_counter()
    for one, good, mine in zip(matrices, finite, own, strict=True):
        if one.is_product:
            _reconstruct(one, good and bool(np.isfinite(one.right).all()), mine, scale, codec, memory)
        else:
            kernels.scale_into(one.values, one.left, scale)
    memory.tally.decode_seconds += perf_counter() - started


def _matrices(values: Array, codec: PowerSGD, memory: Memory, first: Array, second: Array) -> list[_Matrix]:
    matrices = []
    left = right = 0
    for begin, rows, cols in memory.matrices():
        count, place = codec.vectors(rows, cols), slice(begin, begin + rows * cols)
        lefts, rights = (count * rows if count else rows * cols), count * cols
        mine = values[place]
        residual = None if memory.residual is None else memory.residual[place]
        ends = first[left : left + lefts], second[right : right + rights]
        matrices.append(_Matrix(mine, residual, rows, cols, *ends, _is_finite(mine), begin))
        left, right = left + lefts, right + rights
    return matrices


def _is_finite(values: Array) -> bool:
    """Whether all are; looked at one by one only where their sum is not, which may also be too large."""
    with np.errstate(all="ignore"):
        return bool(np.isfinite(values.sum()) or np.isfinite(values).all())


def _project(one: _Matrix, codec: PowerSGD, memory: Memory) -> None:
    """What travels first."""
    if not one.is_product:
        one.left[...] = one.values
    elif not one.finite:
        one.left[...] = np.nan
    else:
        if one.residual is not None:
            kernels.reduce_into(one.residual, [one.values, one.residual], ReduceOp.SUM)
        with kernels.DefaultFloats():  # who flushes subnormal vectors would take them for none and draw others
            start = codec.start(memory, one.begin, one.rows, one.cols)
        kernels.project_into(one.left, one.matrix, start, one.rows, one.cols)


def _reconstruct(one: _Matrix, good: bool, mine: Array, scale: Scale, codec: PowerSGD, memory: Memory) -> None:
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
    memory.shared.vectors[codec.place(memory, one.begin, one.rows, one.cols)] = one.right.copy()
