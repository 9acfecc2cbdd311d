"""Over nodes, each share crosses the wire once for a whole node: bits, and bytes counted where the transport sends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from hvdkit.collectives.group import Choice, Group, Steps, two_phase_bytes
from hvdkit.collectives.hierarchical import Layout, layout_allreduce, sent_share
from hvdkit.collectives.staging import Staging, staging_bytes
from hvdkit.compression import CASTS, Cast
from hvdkit.kernels import ONE, ReduceOp, Scale, numpy_kernels
from hvdkit.transports.base import Bytes, Transfer
from tests.collectives.stepping import random_inputs, run, the_same_bits
from tests.network import MemoryTransport, Wires
from tests.transports.shared import LINE, bells_in, needs_memory_files, needs_native, new_window

pytestmark = [needs_native, needs_memory_files]

NODES = {
    "2 nodes of 2": [[0, 1], [2, 3]],
    "3 nodes of 2": [[0, 1], [2, 3], [4, 5]],
    "2 nodes of 3": [[0, 1, 2], [3, 4, 5]],
    "2 nodes of 2, in turn": [[0, 2], [1, 3]],
    "one node is smaller": [[0, 1], [2, 3], [4]],
    "one rank a node": [[0], [1], [2]],
    "ranks that cross": [[0, 5], [1, 3], [2, 4]],
}
# Cache lines of every rank's part of a share, whatever the nodes above and the codec: 2 x 3 parts of 2-byte numbers.
ELEMENTS = 6 * 32 * 7
IDLE_ROUNDS = 10_000  # many times what the longest operation here needs


class CountingTransport(MemoryTransport):
    """Knows how many bytes went to whom."""

    def __init__(self, rank: int, size: int, wires: Wires) -> None:
        super().__init__(rank, size, wires)
        self.sent: Counter[int] = Counter()

    def isend(self, buffer: Bytes, peer: int, tag: int) -> Transfer:
        self.sent[peer] += buffer.nbytes
        return super().isend(buffer, peer, tag)


def layouts(nodes: list[list[int]]) -> dict[int, Layout]:
    """Every rank's view of the nodes, with areas in memory that the ranks of its node share."""
    found = {}
    for node in nodes:
        nbytes = len(node) * LINE
        window = new_window(nbytes + staging_bytes(len(node))) if len(node) > 1 else None
        for rank in node:
            staging = window and Staging(node, rank, window, nbytes, bells_in(window, len(node)), 0.0)
            found[rank] = Layout(nodes, staging)
    return found


def run_on_nodes(
    nodes: list[list[int]], choice: Choice, steps_of: Callable[[Group], Steps[None]]
) -> dict[int, tuple[Counter[int], int]]:
    """Run ``steps_of(group)`` for every rank; what each rank's transport sent to whom, and what it counts."""
    size = sum(map(len, nodes))
    wires = Wires(size)
    groups = [Group(CountingTransport(rank, size, wires), range(size), choice) for rank in range(size)]
    for rank, layout in layouts(nodes).items():
        groups[rank].layout = layout
    run(groups, steps_of, idle_rounds=IDLE_ROUNDS)
    assert not any(wires.messages.values()), "a message was sent that nobody received"
    return {group.rank: (group.transport.sent, group.bytes_sent) for group in groups}


def reduced_on_nodes(
    nodes: list[list[int]],
    inputs: list[np.ndarray],
    choice: Choice,
    codec: Cast = CASTS["none"],
    op: ReduceOp = ReduceOp.SUM,
    scale: Scale = ONE,
) -> tuple[np.ndarray, dict[int, tuple[Counter[int], int]]]:
    """The result, of which all ranks have the same bits, and what was sent."""
    buffers = [one.copy() for one in inputs]

    def steps_of(group: Group) -> Steps[None]:
        return layout_allreduce(group, group.layout, buffers[group.rank], op, scale, codec, 6, group.layout.draw())

    sent = run_on_nodes(nodes, choice, steps_of)
    return the_same_bits(buffers), sent


def inputs_of(nodes: list[list[int]], elements: int, dtype: str) -> list[np.ndarray]:
    return random_inputs(sum(map(len, nodes)), elements, dtype)


def crossing(name: str, nbytes: int, carriers: int, nodes: int) -> int:
    """What a rank that carries a share of ``nbytes`` sends to other nodes: 2 n / L (K - 1) / K in two phases."""
    two = {"two_phase": 2, "all_to_all": nodes}[name]
    return two * nbytes * (nodes - 1) // (carriers * nodes)


@pytest.mark.parametrize("codec", ["none", "fp16"])
@pytest.mark.parametrize("name", ["two_phase", "all_to_all"])
@pytest.mark.parametrize("nodes", NODES.values(), ids=NODES)
def test_a_rank_sends_its_share_to_its_counterparts_and_nothing_else(nodes, name, codec):
    inputs = inputs_of(nodes, ELEMENTS, "float32")
    _, sent = reduced_on_nodes(nodes, inputs, Choice(name), CASTS[codec])
    carriers, itemsize = min(map(len, nodes)), {"none": 4, "fp16": 2}[codec]
    expected = crossing(name, ELEMENTS * itemsize, carriers, len(nodes))
    for node in nodes:
        for index, rank in enumerate(node):
            to, counted = sent[rank]
            carries = index < carriers
            counterparts = {other[index] for other in nodes if other is not node} if carries else set()
            assert set(to) == counterparts
            assert sum(to.values()) == expected * carries
            of_node = two_phase_bytes(inputs[0].nbytes, len(node)) if len(node) > 1 else 0
            assert counted == expected * carries + of_node


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("nodes", NODES.values(), ids=NODES)
def test_the_sum_of_each_node_comes_first_and_then_that_of_the_nodes(nodes, dtype):
    third = Scale(divisor=3)
    early, late = (ONE, third) if dtype == "float32" else (third, ONE)  # what is rounded on its way is scaled first
    for elements in (1, 17, 2049, ELEMENTS, 300_000):  # the last one takes several chunks
        inputs = inputs_of(nodes, elements, dtype)
        of_nodes = [np.empty_like(inputs[0]) for _ in nodes]
        for into, node in zip(of_nodes, nodes, strict=True):
            numpy_kernels.reduce_into(into, [inputs[rank] for rank in node], ReduceOp.SUM, early)
        expected = np.empty_like(inputs[0])
        numpy_kernels.reduce_into(expected, of_nodes, ReduceOp.SUM, late)
        for name in ("two_phase", "all_to_all"):
            result, _ = reduced_on_nodes(nodes, inputs, Choice(name), scale=third)
            assert result.tobytes() == expected.tobytes(), (name, elements)


@pytest.mark.parametrize("nodes", NODES.values(), ids=NODES)
def test_a_rank_whose_share_is_empty_sends_nothing(nodes):
    # One cache line: the first rank of each node has all of it.
    inputs = inputs_of(nodes, 3, "float32")
    _, sent = reduced_on_nodes(nodes, inputs, Choice("two_phase"))
    for node in nodes:
        assert [rank for rank in node if sent[rank][0]] == node[:1]


@pytest.mark.parametrize(
    ("nodes", "share"),
    [([[0, 1]], 1 / 2), ([[0, 1, 2, 3]], 3 / 4), ([[0, 1], [2, 3]], 1 / 4), ([[0, 1], [2]], 1 / 2), (None, 2 / 3)],
)
def test_the_share_of_a_tensor_that_a_rank_sends_in_each_phase(nodes, share):
    ranks = 3 if nodes is None else sum(map(len, nodes))
    assert sent_share(ranks, None if nodes is None else Layout(nodes, None)) == share
