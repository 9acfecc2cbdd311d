"""Ranks by node: who shares a host with whom, from what launchers and hosts say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


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

    def describe(self, rank: int) -> str:
        """A rank with its host, for messages."""
        return f"rank {rank} ({self.hosts[rank]})" if rank < len(self.hosts) else f"rank {rank}"


def topology_of(rank: int, reports: Sequence[dict[str, Any]]) -> Topology:
    """The topology from what each rank told: its host, and where the launcher says so its local and cross ranks.

    The launcher's word wins over host names: containers may share a name, and namespaces do.
    """
    size = len(reports)
    nodes = _nodes(reports)
    node = next(members for members in nodes if rank in members)
    mine = reports[rank]
    # Launchers that map ranks by socket or package give the ranks of a node local ranks in another order.
    local_ranks = [
        [members.index(one) if reports[one]["local_rank"] is None else reports[one]["local_rank"] for one in members]
        for members in nodes
    ]
    local_rank = local_ranks[nodes.index(node)][node.index(rank)]
    local_size = mine["local_size"] if mine["local_size"] is not None else len(node)
    # Nodes that have a rank with my local rank, and my node's place among them.
    column = [members for members, there in zip(nodes, local_ranks, strict=True) if local_rank in there]
    cross_rank = mine["cross_rank"] if mine["cross_rank"] is not None else column.index(node)
    cross_size = mine["cross_size"] if mine["cross_size"] is not None else len(column)
    homogeneous = len({len(members) for members in nodes}) == 1
    hosts = tuple(str(one["host"]) for one in reports)
    placed = tuple(tuple(members) for members in nodes)
    cores = [[set(reports[one]["cores"]) for one in members] for members in nodes]
    threads = [sum(int(reports[one]["threads"]) for one in members) for members in nodes]
    full = [len(set().union(*there)) <= busy for there, busy in zip(cores, threads, strict=True)]
    core_each = _has_core_each(cores[nodes.index(node)])
    return Topology(
        rank, size, local_rank, local_size, cross_rank, cross_size, homogeneous, hosts, placed, core_each, all(full)
    )


def _has_core_each(cores: Sequence[set[int]]) -> bool:
    """Whether ranks, bound to these cores, need not share any: no set of cores has more ranks bound to it alone."""
    return all(sum(one <= those for one in cores) <= len(those) for those in (*cores, set().union(*cores)))


def _nodes(reports: Sequence[dict[str, Any]]) -> list[list[int]]:
    """Ranks of each node. Local ranks that a launcher gave tell nodes apart even where host names do not."""
    nodes: list[list[int]] = []
    by_host: dict[tuple[str, Any], list[list[int]]] = {}
    launcher_says = all(one["local_rank"] is not None for one in reports)
    has_sizes = launcher_says and all(one["local_size"] is not None for one in reports)
    for rank, one in enumerate(reports):
        local_rank = one["local_rank"]
        candidates = by_host.setdefault((str(one["host"]), one["local_size"] if has_sizes else None), [])
        # The first node of this host, and size, that lacks this local rank; without local ranks, the host's only node.
        node = next(
            (
                members
                for members in candidates
                if not launcher_says or all(reports[member]["local_rank"] != local_rank for member in members)
            ),
            None,
        )
        if node is None:
            node = []
            candidates.append(node)
            nodes.append(node)
        node.append(rank)
    return nodes


def nodes_that_share(nodes: Sequence[Sequence[int]], failed: Sequence[int]) -> list[list[int]]:
    """Which ranks share memory with each other: a node on which any rank failed falls into single ranks."""
    shared: list[list[int]] = []
    for node in nodes:
        together = not any(rank in failed for rank in node)
        shared += [list(node)] if together else [[rank] for rank in node]
    return sorted(shared)
