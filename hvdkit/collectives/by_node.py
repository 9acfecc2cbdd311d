"""Allgather, reduce-scatter and broadcast over nodes: each byte crosses the wire once for all ranks of a node.

Each rank exchanges with its counterparts on the other nodes, over its own connections; the rest goes through the memory
of the nodes. Between K nodes of L ranks, allgather and reduce-scatter of n bytes send n / L (K - 1) / K bytes a rank,
where an exchange between all ranks sends L times as many.
"""

from __future__ import annotations

from hvdkit import kernels
from hvdkit.collectives import exchange
from hvdkit.collectives.group import Array, Group, Steps, equal_parts, equal_runs, is_same, partition
from hvdkit.collectives.hierarchical import counterparts, split_scale
from hvdkit.collectives.scratch import SCRATCH
from hvdkit.collectives.staging import Mode, Staging
from hvdkit.compression import CASTS
from hvdkit.kernels import ONE, ReduceOp, Scale


def is_regular(group: Group) -> bool:
    """True if each node has equally many ranks of a group, several, in the order of the group; alike on all ranks."""
    layout = group.layout
    if layout is None or layout.carriers == 1 or any(len(node) > layout.carriers for node in layout.nodes):
        return False
    return [rank for node in layout.nodes for rank in node] == group.members


class NodeExchange:
    """The operations in a regular group.

    They draw their tickets at once: all ranks of a node call them in one order.
    """

    def __init__(self, group: Group) -> None:
        across = counterparts(group, group.layout)
        assert across is not None, "the group is not regular"
        self._across = across
        self._staging: Staging = group.layout.staging
        self._me, self._ranks = self._staging.me, len(self._staging.members)
        self._first, self._second = self._staging.queues

    def allgather(self, own: Array, whole: Array, tag: int) -> Steps[None]:
        """Fill ``whole`` (flat) with the ``own`` of all ranks (flat, of one length)."""
        blocks = equal_parts(whole, self._across.size)
        return self._allgather(own, blocks, tag, self._first.draw(), self._second.draw())

    def reduce_scatter(self, source: Array, own: Array, op: ReduceOp, scale: Scale, tag: int) -> Steps[None]:
        """Replace ``own`` by this rank's part of ``scale * (op over all ranks' source)``.

        The order of the reduction is that of ranks in a node, then of nodes. ``source`` (flat) has a part of the
        length of ``own`` for each rank, and stays as it is.
        """
        blocks = equal_parts(source, self._across.size)
        return self._reduce_scatter(blocks, own, op, scale, tag, self._first.draw())

    def broadcast(self, buffer: Array, root: int, tag: int) -> Steps[None]:
        """Replace ``buffer`` (flat) on every rank by that of ``root``. Uses ``tag`` and ``tag + 1``."""
        home, index = divmod(root, self._ranks)
        is_home = home == self._across.rank
        ticket = (self._first if is_home else self._second).draw()
        return self._broadcast(buffer, home, index, is_home, tag, ticket)

    def _allgather(self, own: Array, blocks: list[Array], tag: int, first: int, second: int) -> Steps[None]:
        staging, across = self._staging, self._across
        shares = equal_runs(own.size * self._ranks, self._ranks)
        parts = [block[slice(*shares[self._me])] for block in blocks]
        if not is_same(parts[across.rank], own):
            parts[across.rank][...] = own
        transfers = []
        for node in across.peers:
            transfers += across.sendrecv(own, node, parts[node], node, tag)
        yield from staging.run(0, first, Mode.ALLGATHER, blocks[across.rank], shares, ReduceOp.SUM, ONE)
        yield transfers
        yield from staging.enter(1, second)
        for node in across.peers:
            yield [staging.under_way(staging.new_pass(1, Mode.ALLGATHER, blocks[node], shares, ReduceOp.SUM, ONE))]
        self._second.passed += 1

    def _reduce_scatter(
        self, blocks: list[Array], own: Array, op: ReduceOp, scale: Scale, tag: int, ticket: int
    ) -> Steps[None]:
        staging, across = self._staging, self._across
        shares = equal_runs(own.size * self._ranks, self._ranks)
        node_scale, wire_scale = split_scale(own, op, scale, CASTS["none"])
        sent, outgoing = exchange.room_for_payloads(across, own)
        received, incoming = exchange.room_for_payloads(across, own)
        transfers = []
        yield from staging.enter(0, ticket)
        for node in (*across.peers, across.rank):
            mode, into = Mode.REDUCE_SCATTER, outgoing[node]
            yield [staging.under_way(staging.new_pass(0, mode, blocks[node], shares, op, node_scale, None, into))]
            if node != across.rank:
                transfers += across.sendrecv(into, node, incoming[node], node, tag)
        self._first.passed += 1
        yield transfers
        kernels.reduce_into(own, incoming, op, wire_scale)
        SCRATCH.give_back(sent)
        SCRATCH.give_back(received)

    def _broadcast(self, buffer: Array, home: int, index: int, is_home: bool, tag: int, ticket: int) -> Steps[None]:
        staging, op = self._staging, ReduceOp.SUM
        shares = partition(buffer.size, self._ranks, buffer.itemsize)
        if is_home:
            whole = [(0, buffer.size) if rank == index else (0, 0) for rank in range(self._ranks)]
            yield from staging.run(0, ticket, Mode.ALLGATHER, buffer, whole, op, ONE)
        yield from exchange.broadcast(self._across, buffer[slice(*shares[self._me])], home, tag)
        if not is_home:
            yield from staging.run(1, ticket, Mode.ALLGATHER, buffer, shares, op, ONE)


class RankExchange:
    """The same operations in any group, between all its ranks."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def allgather(self, own: Array, whole: Array, tag: int) -> Steps[None]:
        """Fill ``whole`` (flat) with the ``own`` of all ranks (flat, of one length)."""
        return exchange.allgather(self._group, own, equal_parts(whole, self._group.size), tag)

    def reduce_scatter(self, source: Array, own: Array, op: ReduceOp, scale: Scale, tag: int) -> Steps[None]:
        """Replace ``own`` by this rank's part of ``scale * (op over all ranks' source)``, in the order of ranks."""
        bounds = equal_runs(source.size, self._group.size)
        return exchange.reduce_scatter(self._group, source, bounds, own, op, scale, tag)

    def broadcast(self, buffer: Array, root: int, tag: int) -> Steps[None]:
        """Replace ``buffer`` (flat) on every rank by that of ``root``. Uses ``tag`` and ``tag + 1``."""
        return exchange.broadcast(self._group, buffer, root, tag)
