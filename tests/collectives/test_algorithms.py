"""Every algorithm but those of allreduce gives all ranks the right bits, on 2 to 16 ranks; how a buffer is cut."""

from __future__ import annotations

import functools
import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdkit.collectives.algorithms import adasum, combine
from hvdkit.collectives.exchange import (
    allgather,
    alltoall,
    reduce_scatter,
    scatter_allgather_broadcast,
    tree_broadcast,
)
from hvdkit.collectives.group import Group, partition
from hvdkit.kernels import ONE, ReduceOp, Scale
from tests.collectives.stepping import random_inputs, reduce_everywhere, run_everywhere

SIZES = [2, 3, 4, 5, 8, 16]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("algorithm", [tree_broadcast, scatter_allgather_broadcast])
def test_broadcast_reaches_every_rank_from_every_root(algorithm, size):
    for root in range(size):
        inputs = random_inputs(size, 333)
        result, _ = reduce_everywhere(inputs, lambda group, buffer, r=root: algorithm(group, buffer, r, 0))
        np.testing.assert_array_equal(result, inputs[root])


@pytest.mark.parametrize("size", SIZES)
def test_allgather_and_alltoall_move_every_part_to_its_place(size):
    lengths = [rank % 3 for rank in range(size)]  # some ranks have nothing

    def gather(group: Group):
        own = np.full(lengths[group.rank], group.rank, dtype=np.int64)
        segments = [np.empty(length, dtype=np.int64) for length in lengths]
        yield from allgather(group, own, segments, 0)
        return np.concatenate(segments).tolist()

    expected = [rank for rank in range(size) for _ in range(lengths[rank])]
    assert all(result == expected for result, _ in run_everywhere(size, gather))

    def everyone(group: Group):
        outgoing = [np.full(lengths[peer], 100 * group.rank + peer) for peer in range(size)]
        incoming = [np.empty(lengths[group.rank], dtype=np.int64) for _ in range(size)]
        yield from alltoall(group, outgoing, incoming, 0)
        return [part.tolist() for part in incoming]

    for rank, (result, _) in enumerate(run_everywhere(size, everyone)):
        assert result == [[100 * peer + rank] * lengths[rank] for peer in range(size)]


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_reduce_scatter_leaves_each_rank_its_run_of_the_sum(size, in_place):
    inputs = random_inputs(size, 40)
    expected = functools.reduce(np.add, inputs) * np.float32(0.5)
    bounds = partition(40, size, 4)
    sources = [array.copy() for array in inputs]
    runs = [source[slice(*run)] for source, run in zip(sources, bounds, strict=True)]
    owns = runs if in_place else [np.zeros_like(run) for run in runs]
    run_everywhere(
        size,
        lambda group: reduce_scatter(group, sources[group.rank], bounds, owns[group.rank], ReduceOp.SUM, Scale(0.5), 0),
    )
    for run, own, source, before in zip(bounds, owns, sources, inputs, strict=True):
        np.testing.assert_array_equal(own, expected[slice(*run)])
        source[slice(*run)] = before[slice(*run)] if in_place else source[slice(*run)]
        np.testing.assert_array_equal(source, before)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_adasum_combines_pairs_and_pairs_of_pairs_for_each_tensor(size):
    inputs = random_inputs(size, 30)
    lengths = [10, 20]

    def tree(parts: list[np.ndarray]) -> np.ndarray:
        while len(parts) > 1:
            parts = [combine(low, high).astype(np.float32) for low, high in zip(parts[::2], parts[1::2], strict=True)]
        return parts[0]

    expected = np.concatenate([tree([one[:10] for one in inputs]), tree([one[10:] for one in inputs])])
    result, sent = reduce_everywhere(inputs, lambda group, buffer: adasum(group, buffer, lengths, ONE, 0))
    np.testing.assert_array_equal(result, expected)
    assert set(sent) == {4 * 30 * int(math.log2(size))}


def test_adasum_adds_orthogonal_gradients_and_averages_equal_ones():
    one, other = np.array([1.0, 0.0]), np.array([0.0, 2.0])
    np.testing.assert_allclose(combine(one, other), [1.0, 2.0])
    np.testing.assert_allclose(combine(one, one), one)
    np.testing.assert_allclose(combine(np.zeros(2), other), other)


@given(st.integers(0, 10_000), st.integers(1, 17), st.sampled_from([1, 2, 4, 8]))
@settings(deadline=None)
def test_partition_covers_every_element_once_and_starts_on_cache_lines(count, parts, itemsize):
    bounds = partition(count, parts, itemsize)
    assert len(bounds) == parts
    assert bounds[0][0] == 0
    assert bounds[-1][1] == count
    for (_, stop), (start, _) in itertools.pairwise(bounds):
        assert stop == start
        assert start * itemsize % 64 == 0 or start == count
