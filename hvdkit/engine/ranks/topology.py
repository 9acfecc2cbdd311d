"""Ranks by node, from the reports of launchers and hosts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hvdkit.environments.base import World


@dataclass(frozen=True)
class Topology:
    """This rank's place among all ranks, among those of its node, and among those with its local rank."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    is_homogeneous: bool
    hosts: tuple[str, ...]  # the host of each rank
    nodes: tuple[tuple[int, ...], ...]  # the ranks of each node, ascending
    has_core_each: bool = False  # the ranks of this node need not share cores
    is_full: bool = False  # on every node the ranks' threads have every core that they may run on

    @property
    def is_first_of_node(self) -> bool:
        """True on the first rank of each node, whose local rank need not be 0 in an elastic job."""
        return any(node[0] == self.rank for node in self.nodes)

    def describe(self, rank: int) -> str:
        """Return a rank with its host, for messages."""
        return f"rank {rank} ({self.hosts[rank]})" if rank < len(self.hosts) else f"rank {rank}"


def offered_topology(world: World) -> Topology:
    """Return the place that the launcher of an elastic job offers to a process, as if all ranks were on its host."""
    local_rank, local_size, everyone = world.local_rank or 0, world.local_size or 1, tuple(range(world.size))
    return Topology(
        world.rank, world.size, local_rank, local_size, 0, 1, True, (world.host or "",) * world.size, (everyone,)
    )


def topology_of(rank: int, reports: Sequence[dict[str, Any]]) -> Topology:
    """Return the topology from each rank's report. The launcher's numbers win over host names, which may be shared."""
    nodes, own = _nodes(reports), reports[rank]
    node = next(members for members in nodes if rank in members)
    # Launchers that map ranks by socket or package give the ranks of a node local ranks in another order.
    local_ranks = [
        [members.index(m) if reports[m]["local_rank"] is None else reports[m]["local_rank"] for m in members]
        for members in nodes
    ]
    local_rank = local_ranks[nodes.index(node)][node.index(rank)]
    local_size = own["local_size"] if own["local_size"] is not None else len(node)
    # Nodes that have a rank with this local rank, and the index of this node among them.
    column = [members for members, there in zip(nodes, local_ranks, strict=True) if local_rank in there]
    cores = [[set(reports[member]["cores"]) for member in members] for members in nodes]
    threads = [sum(int(reports[member]["threads"]) for member in members) for members in nodes]
    return Topology(
        rank, len(reports), local_rank, local_size, column.index(node), len(column),
        is_homogeneous=len({len(members) for members in nodes}) == 1,
        hosts=tuple(str(report["host"]) for report in reports),
        nodes=tuple(tuple(members) for members in nodes),
        has_core_each=_have_core_each(cores[nodes.index(node)]),
        is_full=all(len(set().union(*there)) <= busy for there, busy in zip(cores, threads, strict=True)),
    )  # fmt: skip


def _have_core_each(bound: Sequence[set[int]]) -> bool:
    """True if no set of cores has more ranks bound to it alone than cores. ``bound``: the cores of each rank."""
    everything: set[int] = set().union(*bound)
    return all(sum(own <= cores for own in bound) <= len(cores) for cores in [*bound, everything])


def _nodes(reports: Sequence[dict[str, Any]]) -> list[list[int]]:
    """Return the ranks of each node. Local ranks of a launcher tell nodes apart even where host names do not."""
    launcher_says = all(report["local_rank"] is not None for report in reports)
    has_sizes = launcher_says and all(report["local_size"] is not None for report in reports)
    nodes: dict[tuple[Any, ...], list[int]] = {}
    earlier: Counter[tuple[Any, ...]] = Counter()  # ranks of the same host, and size, with the same local rank
    for rank, report in enumerate(reports):
        host = str(report["host"]), report["local_size"] if has_sizes else None
        place = *host, report["local_rank"]
        nodes.setdefault((*host, earlier[place] if launcher_says else 0), []).append(rank)
        earlier[place] += 1
    return list(nodes.values())


def nodes_that_share(nodes: Sequence[Sequence[int]], failed: Sequence[int]) -> list[list[int]]:
    """Return the ranks that share memory with each other: a node with a rank that failed falls into single ranks."""
    shared: list[list[int]] = []
    for node in nodes:
        together = not any(rank in failed for rank in node)
        shared += [list(node)] if together else [[rank] for rank in node]
    return sorted(shared)
