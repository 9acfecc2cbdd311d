"""The kernels of dense codecs in numpy: their specification and fallback.

These are integers and signs with a scale a block, and low-rank factors. Arithmetic is float32 (dot products of
``orthonormalise`` are float64), with one rounding an operation, in an order that no processor changes, so that each
rank computes the same. The scale of a block with a value that is not finite is NaN, which decodes to NaN.

Arguments are checked as in ``numpy_kernels``; data of other ranks is checked here too.

A low-rank factor is a flat array of vectors, one after the other: ``left`` has vectors as long as the matrix has rows,
``right`` as long as it has columns. Matrices are flat, row by row.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hvdkit.kernels.dtypes import Array
from hvdkit.kernels.numpy_kernels import CHUNK, DefaultFloats

_TINY = np.finfo(np.float32).tiny
_NIBBLE_ZERO = 8
_LANES = 16


def quantise_into(
    codes: Array, scales: Array, values: Array, residual: Array | None, bits: int, block: int, seed: int | None = None
) -> None:
    """Encode ``v = values + residual`` as integers of 8 or 4 bits, and keep the error in the residual.

    Each ``block`` elements (a multiple of 16) share one float32 of ``scales``: the largest magnitude over L, which is
    127 for 8 bits and 7 for 4. A code q is ``v / scale`` (as ``v * (1 / scale)``) rounded to nearest, ties to even; or,
    with a ``seed`` from 0 to 2**32 - 1, rounded down after adding a number from 0 to 1 that depends on seed and place
    only (stochastic rounding, right on average). Then ``residual = v - q * scale``.

    ``codes`` are uint8: with 8 bits one for each element, in two's complement; with 4 bits one for two elements, as
    q + 8, the first element in the lower bits; a missing second element is 8.

    Where the scale would be below the smallest normal float32 it is 0, and so are the codes: the residual keeps all.
    Where a v is not finite, or so large that ``L * scale`` overflows, the scale is NaN, the codes are 0, and the
    residual of that block stays as it was. ``residual`` may be None.
    """
    with np.errstate(all="ignore"), DefaultFloats():
        for elements, blocks in _chunks(values.size, block):
            before = None if residual is None else residual[elements]
            v = values[elements] if before is None else values[elements] + before
            v = v.reshape(blocks.stop - blocks.start, -1)
            q, scale, bad = _quantised(v, 127 if bits == 8 else 7, elements.start, seed)
            scales[blocks] = scale
            codes[elements.start * bits // 8 : -(-elements.stop * bits // 8)] = _packed(q.ravel(), bits)
            if before is not None:
                left = v - q.astype(np.float32) * scale[:, None]
                before[:] = np.where(bad[:, None], before.reshape(v.shape), left).ravel()


def dequantise_into(
    out: Array, codes: Array, scales: Array, bits: int, block: int, scale: float = 1.0, accumulate: bool = False
) -> None:
    """Decode ``out = q * scales[b] * scale`` of codes of ``quantise_into``; with ``accumulate``, add to ``out``."""
    _expect(codes=(codes, -(-out.size * bits // 8)), scales=(scales, -(-out.size // block)))
    with np.errstate(all="ignore"), DefaultFloats():
        factor = np.float32(scale)
        for elements, blocks in _chunks(out.size, block):
            part = codes[elements.start * bits // 8 : -(-elements.stop * bits // 8)]
            q = _unpacked(part, bits)[: elements.stop - elements.start].astype(np.float32)
            x = q.reshape(blocks.stop - blocks.start, -1) * scales[blocks, None] * factor
            out[elements] = out[elements] + x.ravel() if accumulate else x.ravel()


def sign_into(packed: Array, scales: Array, values: Array, residual: Array | None, block: int) -> None:
    """Encode the signs of ``v = values + residual``, a bit each, and keep the error in the residual.

    Bit ``i % 8`` of byte ``i // 8`` of ``packed`` (uint8) is 1 where the sign bit of v is not set, so it is 0 for -0.0;
    bits after the last element are 0. Each ``block`` elements (a multiple of 512) share one float32 of ``scales``, the
    mean magnitude. It is summed in 16 lanes: lane j adds elements j, j + 16, ..., then lanes j and j + 8 are added,
    then j and j + 4, and so on. Then ``residual = v - scale`` or ``v + scale``, as the bit says.

    Where a v is not finite or the sum overflows, the scale is NaN, the bits are 0, and the residual of that block stays
    as it was. ``residual`` may be None.
    """
    with np.errstate(all="ignore"), DefaultFloats():
        for elements, blocks in _chunks(values.size, block):
            before = None if residual is None else residual[elements]
            v = values[elements] if before is None else values[elements] + before
            v = v.reshape(blocks.stop - blocks.start, -1)
            sums = sums_in_lanes(np.abs(v))
            scale = np.where(np.isfinite(sums), sums / np.float32(v.shape[1]), np.float32(np.nan))
            bad = np.isnan(scale)[:, None]
            positive = ~np.signbit(v)
            scales[blocks] = scale
            packed[elements.start // 8 : -(-elements.stop // 8)] = np.packbits(positive & ~bad, bitorder="little")
            if before is not None:
                left = v - np.where(positive, scale[:, None], -scale[:, None])
                before[:] = np.where(bad, before.reshape(v.shape), left).ravel()


def unsign_into(
    out: Array, packed: Array, scales: Array, block: int, scale: float = 1.0, accumulate: bool = False
) -> None:
    """Decode plus or minus ``scales[b] * scale`` of bits of ``sign_into`` to ``out``; with ``accumulate``, add it."""
    _expect(packed=(packed, -(-out.size // 8)), scales=(scales, -(-out.size // block)))
    with np.errstate(all="ignore"), DefaultFloats():
        factor = np.float32(scale)
        for elements, blocks in _chunks(out.size, block):
            part = packed[elements.start // 8 : -(-elements.stop // 8)]
            positive = np.unpackbits(part, bitorder="little")[: elements.stop - elements.start]
            magnitude = (scales[blocks] * factor)[:, None]
            x = np.where(positive.reshape(magnitude.size, -1) != 0, magnitude, -magnitude).ravel()
            out[elements] = out[elements] + x if accumulate else x


def random_words(counters: Array, seed: int) -> Array:
    """Return a random uint32 for each of ``counters`` (uint32) and a seed: "lowbias32" (Chris Wellons, 2018)."""
    words = counters + np.uint32(seed * 0x9E3779B9 & 0xFFFFFFFF)
    words ^= words >> np.uint32(16)
    words *= np.uint32(0x7FEB352D)
    words ^= words >> np.uint32(15)
    words *= np.uint32(0x846CA68B)
    words ^= words >> np.uint32(16)
    return np.asarray(words)


def _expect(**arrays: tuple[Array, int]) -> None:
    """Raise ValueError unless arrays of another rank, by name, have as many elements as given."""
    for name, (array, count) in arrays.items():
        if array.size != count:
            raise ValueError(f"{name}: expected {count} elements, got {array.size}")


def _chunks(count: int, block: int) -> Iterator[tuple[slice, slice]]:
    """Yield elements and their blocks, of one length: whole blocks, then the last if that is shorter."""
    whole, at_once = count // block, max(1, CHUNK // block)
    for begin in range(0, whole, at_once):
        end = min(whole, begin + at_once)
        yield slice(begin * block, end * block), slice(begin, end)
    if whole * block < count:
        yield slice(whole * block, count), slice(whole, whole + 1)


def _quantised(v: Array, limit: int, begin: int, seed: int | None) -> tuple[Array, Array, Array]:
    """Return codes, scales, and True for rows that cannot be encoded; ``v`` has a block a row, from ``begin`` on."""
    scale = np.abs(v).max(axis=1) / np.float32(limit)
    bad = ~np.isfinite(np.float32(limit) * scale)
    scale[scale < _TINY] = 0
    scale[bad] = np.nan
    inverse = np.where(scale > 0, np.float32(1) / scale, np.float32(0))
    x = np.where(bad[:, None], np.float32(0), v) * inverse[:, None]
    if seed is None:
        x = np.rint(x)
    else:
        counters = np.arange(begin, begin + v.size, dtype=np.uint64).astype(np.uint32)
        uniform = (random_words(counters, seed) >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)
        x = np.floor(x + uniform.reshape(v.shape))
    return np.clip(x, -limit, limit).astype(np.int8), scale, bad


def _packed(q: Array, bits: int) -> Array:
    if bits == 8:
        return q.view(np.uint8)
    nibbles = np.full(q.size + q.size % 2, _NIBBLE_ZERO, np.uint8)
    nibbles[: q.size] = q + _NIBBLE_ZERO
    return np.asarray(nibbles[::2] | nibbles[1::2] << 4)


def _unpacked(codes: Array, bits: int) -> Array:
    if bits == 8:
        return codes.view(np.int8)
    nibbles = np.empty(2 * codes.size, np.int8)
    nibbles[::2] = codes & 15
    nibbles[1::2] = codes >> 4
    return np.asarray(nibbles - np.int8(_NIBBLE_ZERO))


def sums_in_lanes(numbers: Array) -> Array:
    """Return sums along the last axis in 16 lanes, which add every 16th number in order, then are added in halves."""
    count = numbers.shape[-1]
    groups = np.zeros((*numbers.shape[:-1], max(1, -(-count // _LANES)), _LANES), numbers.dtype)
    groups.reshape(*numbers.shape[:-1], -1)[..., :count] = numbers
    with np.errstate(all="ignore"), DefaultFloats():
        # Reduce may add in another order. A lane begins with zero, so that it is not -0.0.
        lanes = np.add.accumulate(groups, axis=-2)[..., -1, :] + numbers.dtype.type(0)
        while lanes.shape[-1] > 1:
            half = lanes.shape[-1] // 2
            lanes = lanes[..., :half] + lanes[..., half:]
    return np.asarray(lanes[..., 0])


def project_into(left: Array, matrix: Array, right: Array, rows: int, cols: int) -> None:
    """Compute ``left[k] = matrix @ right[k]``: products are added in 16 lanes, which are folded in halves."""
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
    """Compute ``right[k] = matrix.T @ left[k]``, added row by row."""
    rank = max(1, left.size // rows)
    sums = right.reshape(rank, cols)
    sums[...] = 0
    with np.errstate(all="ignore"), DefaultFloats():
        for row, factors in zip(matrix.reshape(rows, cols), left.reshape(rank, rows).T, strict=True):
            sums += factors[:, None] * row


def orthonormalise(vectors: Array, length: int) -> None:
    """Make vectors of ``length`` elements orthogonal to earlier vectors, and of norm 1 (modified Gram-Schmidt).

    A vector that depends on earlier vectors becomes zero.
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

    ``out`` and ``matrix`` may be None.
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
