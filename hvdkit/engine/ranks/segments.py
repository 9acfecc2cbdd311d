"""Who has which segment of a node's memory: the transport, each process set's staging, each lane's buckets."""

from __future__ import annotations

from functools import partial

from hvdkit.collectives.group import Group
from hvdkit.collectives.hierarchical import Layout
from hvdkit.collectives.staging import Staging, staging_bytes
from hvdkit.engine.ranks.repetitions import REGIONS, Repetitions, most_bytes
from hvdkit.transports.node import has_segment


# The segments of the node's memory: 0 is the transport's, odd ones are process sets', even ones lanes'.
def staging_segment(process_set_id: int) -> int:
    """Where the ranks of a process set stage tensors."""
    return 2 * process_set_id + 1


def group_bytes(ranks: int) -> int:
    """What a process set's ranks on one node, so many, share: their staging, and operations that come again."""
    from hvdkit.kernels._native import Repeated

    return staging_bytes(ranks) + Repeated.bytes_needed(ranks, REGIONS, most_bytes(ranks))


def lane_segment(lane_id: int) -> int:
    """Where a lane's buckets live."""
    return 2 * lane_id + 2


def layout_of(group: Group, process_set_id: int, spin_seconds: float) -> Layout | None:
    """How a process set lies on nodes, with the memory that its ranks on this node share; None if no two share any.

    None too where so many sets were made before that all segments are taken.
    """
    transport, rank = group.transport, group.members[group.rank]
    nodes = [here for node in transport.nodes if (here := [member for member in node if member in group.members])]
    if all(len(node) == 1 for node in nodes) or not has_segment(staging_segment(process_set_id)):
        return None
    node = next(members for members in nodes if rank in members)
    if len(node) == 1:
        return Layout(nodes, None)
    from hvdkit.transports.node.transport import NodeTransport

    assert isinstance(transport, NodeTransport)
    window = transport.memory.window(staging_segment(process_set_id), group_bytes(len(node)))
    return Layout(nodes, Staging(node, rank, window, 0, transport.wakeups_of(node), spin_seconds))


def repetitions_of(group: Group) -> Repetitions | None:
    """Small operations that come again in a process set; None if not all of its ranks share memory, each with a core.

    Where there are more ranks than cores, one that waits keeps another from coming.
    """
    staging = None if group.layout is None else group.layout.staging
    if staging is None or len(staging.members) < group.size or staging.spin_seconds == 0:
        return None
    from hvdkit.kernels._native import Repeated

    begin, most = staging_bytes(group.size), most_bytes(group.size)
    area = Repeated(staging.window, begin, group.size, group.rank, REGIONS, most)
    nbytes = Repeated.bytes_needed(group.size, REGIONS, most)
    return Repetitions(group, area, most, partial(staging.window.give_back, begin, nbytes))
