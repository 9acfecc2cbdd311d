"""Adasum (Maleki et al., 2020): adds gradients where they are orthogonal, averages them where they agree.

Pairs combine, then pairs of pairs. Each tensor of a fused buffer is combined by itself, in float64.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from hvdkit import kernels
from hvdkit.collectives.exchange import SCRATCH, scale_in_place
from hvdkit.collectives.group import Array, Group, Steps
from hvdkit.kernels import Scale


def combine(lower: Array, higher: Array) -> Array:
    """Return (1 - l.h / 2 l.l) l + (1 - l.h / 2 h.h) h, computed in float64, in the dtype of the arguments.

    A vector of zeros leaves the other vector as it is. Two ranks compute it, each for itself, with the same bits.
    """
    with kernels.DefaultFloats():
        low, high = lower.astype(np.float64), higher.astype(np.float64)
        # Not by BLAS, whose order of additions depends on the settings of its threads.
        pairs = ((low, high), (low, low), (high, high))
        dot, low_square, high_square = (float(np.einsum("i,i->", *pair)) for pair in pairs)
        low_factor = 1.0 if low_square == 0.0 else 1.0 - dot / (2.0 * low_square)
        high_factor = 1.0 if high_square == 0.0 else 1.0 - dot / (2.0 * high_square)
        result: Array = (low_factor * low + high_factor * high).astype(lower.dtype)
    return result


def adasum(group: Group, buffer: Array, lengths: Sequence[int], scale: Scale, tag: int) -> Steps[None]:
    """Replace ``buffer`` (flat tensors of ``lengths`` elements, one after the other) by the ranks' Adasum.

    The number of ranks must be a power of two. Sends n log2 P bytes a rank. Uses tags from ``tag`` to ``tag + 6``.
    """
    assert group.size & (group.size - 1) == 0
    scratch = SCRATCH.take(buffer.nbytes)
    other = scratch[: buffer.nbytes].view(buffer.dtype)
    for level in range(group.size.bit_length() - 1):
        peer = group.rank ^ (1 << level)
        yield [group.irecv(other, peer, tag + level % 7), group.isend(buffer, peer, tag + level % 7)]
        lower, higher = (buffer, other) if group.rank < peer else (other, buffer)
        for start, end in itertools.pairwise([0, *itertools.accumulate(lengths)]):
            buffer[start:end] = combine(lower[start:end], higher[start:end])
    SCRATCH.give_back(scratch)
    scale_in_place(buffer, scale)
