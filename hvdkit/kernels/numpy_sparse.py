"""The kernels around a sparse selection in numpy: their specification and fallback. See ``numpy_codecs`` for errors."""

from __future__ import annotations

import numpy as np

from hvdkit.kernels.dtypes import Array, Arrays
from hvdkit.kernels.numpy_codecs import random_words
from hvdkit.kernels.numpy_kernels import CHUNK, DefaultFloats, scale_into
from hvdkit.kernels.reduce_op import Scale


def select_into(
    indices: Array, picked: Array, values: Array | None, residual: Array | None, threshold: float
) -> tuple[int, int]:
    """Write positions and values of elements above ``threshold`` in ``v = values + residual``; keep the rest.

    ``values`` or ``residual`` may be None, but not both. An element is selected if ``|v| > threshold`` (as a float32)
    or if it is not finite. Selected elements are written to ``indices`` (uint32) and ``picked`` in ascending order
    until these are full; the rest of these is undefined. The residual becomes 0 where v was written, and v elsewhere.
    Where v is not finite, it stays as it was, or becomes 0 if there are no values: so it stays finite.

    Returns the numbers of written and of selected elements.
    """
    count = _some(values, residual).size
    emitted = selected = 0
    with np.errstate(all="ignore"), DefaultFloats():
        for begin in range(0, count, CHUNK):
            chunk = slice(begin, begin + CHUNK)
            v = _elements(values, residual, chunk)
            positions = np.flatnonzero(~(np.abs(v) <= np.float32(threshold)))
            taken = positions[: indices.size - emitted]
            selected += positions.size
            into = slice(emitted, emitted + taken.size)
            indices[into] = taken + begin
            picked[into] = v[taken]
            emitted += taken.size
            if residual is not None:
                left = v.copy()
                left[taken] = 0
                special = positions[~np.isfinite(v[positions])]
                left[special] = 0 if values is None else residual[chunk][special]
                residual[chunk] = left
    return emitted, selected


def scatter_add_into(out: Array, indices: Array, values: Array, scale: float = 1.0) -> None:
    """Compute ``out[indices[k]] += values[k] * scale``, for indices (uint32) that ascend.

    Raises ValueError for indices that do not ascend or are beyond ``out``, which is then as it was.
    """
    if values.size != indices.size:
        raise ValueError(f"scatter_add_into: values: expected {indices.size} elements as in indices, got {values.size}")
    _check_ascending("scatter_add_into: indices", indices, out.size)
    with np.errstate(all="ignore"), DefaultFloats():
        out[indices] += values * np.float32(scale)


def sum_pairs_into(out: Array, indices: Arrays, values: Arrays, scale: float | Scale = 1.0) -> None:
    """Compute ``out = scale * (zeros + values[0] at indices[0] + values[1] at indices[1] ...)``.

    Indices (uint32) ascend in each array, and a sum is scaled as in ``reduce_into``. Raises ValueError for indices that
    do not ascend or are beyond ``out``, which is then as it was.
    """
    if len(values) != len(indices):
        raise ValueError(f"sum_pairs_into: values: expected {len(indices)} arrays as in indices, got {len(values)}")
    for number, (places, added) in enumerate(zip(indices, values, strict=True)):
        where = f"indices[{number}]"
        if added.size != places.size:
            problem = f"expected {places.size} elements as in {where}, got {added.size}"
            raise ValueError(f"sum_pairs_into: values[{number}]: {problem}")
        _check_ascending(f"sum_pairs_into: {where}", places, out.size)
    with np.errstate(all="ignore"), DefaultFloats():
        out[...] = 0.0
        for places, added in zip(indices, values, strict=True):
            out[places] += added
    scale_into(out, out, scale)


def _check_ascending(what: str, indices: Array, count: int) -> None:
    bad = indices >= count
    bad[1:] |= indices[1:] <= indices[:-1]
    if bad.any():
        first = int(bad.argmax())
        got = str(indices[first]) + (f" after {indices[first - 1]}" if first > 0 else "")
        raise ValueError(f"{what}: expected ascending indices below {count}, got {got}")


def abs_sample_into(sample: Array, values: Array | None, residual: Array | None, stride: int, seed: int) -> None:
    """Sample ``|v|`` of an element of each ``stride``, at an index that depends on ``seed``; v as in ``select_into``.

    Stratified sampling: a random index in each stratum, so that gradients with a period do not bias the estimate. The
    last stratum may be shorter. A value that is not finite counts as infinite.
    """
    count = _some(values, residual).size
    with np.errstate(all="ignore"), DefaultFloats():
        for begin in range(0, sample.size, CHUNK):
            j = np.arange(begin, min(begin + CHUNK, sample.size))
            random = random_words(j.astype(np.uint32), seed).astype(np.int64) % stride
            v = _elements(values, residual, j * stride + random % np.minimum(stride, count - j * stride))
            sample[j] = np.where(np.isfinite(v), np.abs(v), np.float32(np.inf))


def momentum_into(velocity: Array, accumulated: Array, gradient: Array, momentum: float) -> bool:
    """Compute ``velocity = momentum * velocity + gradient``, then ``accumulated += velocity``.

    The momentum correction of Deep Gradient Compression (Lin et al., 2018). Where the gradient is not finite, both stay
    as they were. Returns True if all of it was finite.
    """
    all_finite = True
    with np.errstate(all="ignore"), DefaultFloats():
        factor = np.float32(momentum)
        for begin in range(0, velocity.size, CHUNK):
            chunk = slice(begin, begin + CHUNK)
            finite = np.isfinite(gradient[chunk])
            moved = factor * velocity[chunk] + gradient[chunk]
            np.copyto(accumulated[chunk], accumulated[chunk] + moved, where=finite)
            np.copyto(velocity[chunk], moved, where=finite)
            all_finite = all_finite and bool(finite.all())
    return all_finite


def _some(values: Array | None, residual: Array | None) -> Array:
    array = residual if values is None else values
    assert array is not None
    return array


def _elements(values: Array | None, residual: Array | None, which: slice | Array) -> Array:
    v = _some(values, residual)[which]
    return np.asarray(v if values is None or residual is None else v + residual[which])
