"""Allgather, reduce-scatter and broadcast over nodes: results, and bytes counted where the transport sends."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from hvdkit.collectives.by_node import NodeExchange, RankExchange, is_regular
from hvdkit.collectives.group import AUTO, Group, Steps
from hvdkit.collectives.hierarchical import Layout
from hvdkit.kernels import ONE, ReduceOp, Scale, numpy_kernels
from tests.collectives.stepping import random_inputs, run_everywhere
from tests.collectives.test_hierarchical import run_on_nodes
from tests.network import MemoryTransport, Wires
from tests.transports.shared import needs_memory_files, needs_native

pytestmark = [needs_native, needs_memory_files]

NODES = {
    "2 nodes of 2": [[0, 1], [2, 3]],
    "3 nodes of 2": [[0, 1], [2, 3], [4, 5]],
    "2 nodes of 3": [[0, 1, 2], [3, 4, 5]],
}
LENGTHS = (1, 33, 300_001)  # the last one takes several chunks
Call = Callable[[NodeExchange | RankExchange, int], Steps[None]]


def bytes_between(nodes: list[list[int]], steps: Call) -> list[int]:
    """Run the steps on every rank, and return the bytes that each sends to other nodes; it sends none to its own."""
    sent = run_on_nodes(nodes, AUTO, lambda group: steps(NodeExchange(group), group.rank))
    for node in nodes:
        for rank in node:
            assert not set(sent[rank][0]) & set(node)
    return [sum(sent[rank][0].values()) for rank in sorted(sent)]


def each_rank(nodes: list[list[int]]) -> range:
    return range(sum(map(len, nodes)))


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("nodes", NODES.values(), ids=NODES)
def test_allgather_sends_each_part_to_each_other_node_once(nodes, length, in_place):
    ranks = each_rank(nodes)
    inputs = random_inputs(len(ranks), length)
    outputs = [np.zeros(len(ranks) * length, dtype="float32") for _ in ranks]
    owns = [output[rank * length : (rank + 1) * length] if in_place else inputs[rank].copy()
            for rank, output in enumerate(outputs)]  # fmt: skip
    for own, part in zip(owns, inputs, strict=True):
        own[...] = part
    sent = bytes_between(nodes, lambda by, rank: by.allgather(owns[rank], outputs[rank], 8))
    assert sent == [(len(nodes) - 1) * inputs[0].nbytes] * len(ranks)
    for output in outputs:
        assert output.tobytes() == np.concatenate(inputs).tobytes()


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float16", "int32"])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("nodes", NODES.values(), ids=NODES)
def test_reduce_scatter_reduces_in_a_node_first_and_leaves_its_input(nodes, length, dtype, in_place):
    ranks = each_rank(nodes)
    inputs = random_inputs(len(ranks), len(ranks) * length, dtype)
    scale = ONE if dtype == "int32" else Scale(divisor=len(ranks))
    early, late = (scale, ONE) if dtype == "float16" else (ONE, scale)  # a node's sum could be too large for fp16
    of_nodes = [np.empty_like(inputs[0]) for _ in nodes]
    for into, node in zip(of_nodes, nodes, strict=True):
        numpy_kernels.reduce_into(into, [inputs[rank] for rank in node], ReduceOp.SUM, early)
    expected = np.empty_like(inputs[0])
    numpy_kernels.reduce_into(expected, of_nodes, ReduceOp.SUM, late)
    sources = [array.copy() for array in inputs]
    owns = [source[rank * length : (rank + 1) * length] if in_place else np.zeros_like(source[:length])
            for rank, source in enumerate(sources)]  # fmt: skip
    sent = bytes_between(nodes, lambda by, rank: by.reduce_scatter(sources[rank], owns[rank], ReduceOp.SUM, scale, 8))
    assert sent == [(len(nodes) - 1) * owns[0].nbytes] * len(ranks)
    assert np.concatenate(owns).tobytes() == expected.tobytes()
    for rank, source in enumerate(sources):
        source[rank * length : (rank + 1) * length] = inputs[rank][rank * length : (rank + 1) * length]
        assert source.tobytes() == inputs[rank].tobytes()


@pytest.mark.parametrize("root", range(4))
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("nodes", NODES.values(), ids=NODES)
def test_broadcast_sends_the_tensor_to_each_other_node_once(nodes, length, root):
    buffers = random_inputs(len(each_rank(nodes)), length)
    expected = buffers[root].tobytes()
    sent = bytes_between(nodes, lambda by, rank: by.broadcast(buffers[rank], root, 8))
    assert [buffer.tobytes() for buffer in buffers] == [expected] * len(buffers)
    if len(nodes) == 2:
        assert sum(sent) == buffers[0].nbytes


@pytest.mark.parametrize("nodes", NODES.values(), ids=NODES)
def test_operations_that_overlap_take_the_memory_of_a_node_in_turn(nodes):
    ranks = each_rank(nodes)
    inputs = [random_inputs(len(ranks), 2049 + index) for index in range(3)]
    outputs = [[np.zeros(len(ranks) * array.size, dtype="float32") for array in arrays] for arrays in inputs]

    def steps(by: NodeExchange, rank: int) -> Steps[None]:
        calls = enumerate(zip(inputs, outputs, strict=True))
        begun = [by.allgather(arrays[rank], into[rank], 8 * index) for index, (arrays, into) in calls]
        # The last one begins first on odd ranks: it waits until the others have had their turns.
        pending = {id(one): [] for one in begun}
        running = begun[::-1] if rank % 2 else begun
        while running:
            for one in list(running):
                pending[id(one)] = [transfer for transfer in pending[id(one)] if not transfer.done()]
                if not pending[id(one)]:
                    try:
                        pending[id(one)] = next(one)
                    except StopIteration:
                        running.remove(one)
            yield []

    run_on_nodes(nodes, AUTO, lambda group: steps(NodeExchange(group), group.rank))
    for arrays, into in zip(inputs, outputs, strict=True):
        for output in into:
            assert output.tobytes() == np.concatenate(arrays).tobytes()


def test_between_all_ranks_the_sum_runs_in_their_order():
    inputs = random_inputs(3, 21)
    owns = [np.zeros(7, dtype="float32") for _ in range(3)]
    kept = [array.copy() for array in inputs]
    run_everywhere(3, lambda group: RankExchange(group).reduce_scatter(
        inputs[group.rank], owns[group.rank], ReduceOp.SUM, ONE, 8))  # fmt: skip
    assert np.concatenate(owns).tobytes() == (inputs[0] + inputs[1] + inputs[2]).tobytes()
    assert [array.tobytes() for array in inputs] == [array.tobytes() for array in kept]


@pytest.mark.parametrize(
    ("nodes", "is_so"),
    [
        ([[0, 1], [2, 3]], True),
        ([[0, 2], [1, 3]], False),
        ([[0, 1], [2]], False),
        ([[0], [1, 2]], False),
        ([[0], [1]], False),
    ],
)
def test_groups_are_regular_with_equal_nodes_in_the_order_of_ranks(nodes, is_so):
    size = sum(map(len, nodes))
    group = Group(MemoryTransport(0, size, Wires(size)), range(size))
    assert not is_regular(group)
    group.layout = Layout(nodes, None)
    assert is_regular(group) == is_so
