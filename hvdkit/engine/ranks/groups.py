"""The process sets of this engine: their ranks, the node memory that these share, and their device's collectives.

Segments of a node's memory: 0 is the transport's, odd segments are process sets', even ones lanes'; those of groups of
ordered operations count down from the last.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from hvdkit.collectives.group import Choice, Group
from hvdkit.collectives.hierarchical import Layout
from hvdkit.collectives.staging import Staging, staging_bytes
from hvdkit.engine.ranks.turns import SmallReductions, most_bytes
from hvdkit.transports.base import Transport
from hvdkit.transports.node import SEGMENTS, has_segment

if TYPE_CHECKING:
    from hvdkit.transports.gpu.device import DeviceCollectives


def staging_segment(process_set_id: int) -> int:
    """Return the segment in which the ranks of a process set stage tensors."""
    return 2 * process_set_id + 1


def lane_segment(lane_id: int) -> int:
    """Return the segment of a lane's buckets."""
    return 2 * lane_id + 2


def group_bytes(ranks: int) -> int:
    """Return the bytes that ``ranks`` ranks of a group on one node share: staging, and turns."""
    from hvdkit.kernels._native import Turns

    return staging_bytes(ranks) + Turns.bytes_needed(ranks, most_bytes(ranks))


def turns_of(group: Group) -> Any:
    """Return the turns of a group whose ranks all share memory, behind the staging; None for another group."""
    staging = None if group.layout is None else group.layout.staging
    if staging is None or len(staging.members) < group.size:
        return None
    from hvdkit.kernels._native import Turns
    from hvdkit.transports.node.transport import NodeTransport

    transport, size = group.transport, group.size
    assert isinstance(transport, NodeTransport)
    bells = transport.wakeups_of(group.members)
    return Turns(staging.window, staging_bytes(size), size, group.rank, most_bytes(size), bells)


def ordered_segment(number: int) -> int:
    """Return the segment of a group of ordered operations; such groups are numbered from 1."""
    return SEGMENTS - number


def layout_of(group: Group, segment: int, spin_seconds: float) -> Layout | None:
    """Return a group's layout on nodes; None if no two ranks share memory, or earlier groups took all segments."""
    transport, rank = group.transport, group.members[group.rank]
    nodes = [here for node in transport.nodes if (here := [member for member in group.members if member in node])]
    if all(len(node) == 1 for node in nodes) or not has_segment(segment):
        return None
    node = next(members for members in nodes if rank in members)
    if len(node) == 1:
        return Layout(nodes, None)
    from hvdkit.transports.node.transport import NodeTransport

    assert isinstance(transport, NodeTransport)
    window = transport.memory.window(segment, group_bytes(len(node)))
    return Layout(nodes, Staging(node, rank, window, 0, transport.wakeups_of(node), spin_seconds))


def _small_reductions_of(group: Group) -> SmallReductions | None:
    """Return the small reductions of a process set, or None unless all its ranks share memory, each with a core."""
    turns = turns_of(group)
    if turns is None or group.layout.staging.spin_seconds == 0:
        return None
    begin, nbytes = staging_bytes(group.size), group_bytes(group.size) - staging_bytes(group.size)
    return SmallReductions(group, turns, partial(group.layout.staging.window.give_back, begin, nbytes))


class Groups:
    """The members of each process set (``ranks``, by number; 0 is everyone), and their groups, made when needed."""

    def __init__(
        self, transport: Transport, static_process_sets: Sequence[list[int]], choice: Choice, pass_spin_seconds: float
    ) -> None:
        self.ranks: dict[int, list[int]] = {0: list(range(transport.size))}
        self.ranks.update(enumerate(static_process_sets, start=1))
        self.transport, self.choice, self.pass_spin_seconds = transport, choice, pass_spin_seconds
        self._groups: dict[int, Group] = {}
        self.small_reductions: dict[int, SmallReductions] = {}  # of the process sets that have any
        self._making = threading.Lock()  # the driver and threads that register gradients make groups
        self.device: str | None = None  # ("cuda:0") that this rank's named operations have used last
        self._device_collectives: dict[tuple[int, str], DeviceCollectives | None] = {}
        # A plan was put off since a rank has joined, and the number of joins with such plans; the same on all ranks.
        self.plans_put_off = False
        self.plan_epoch = 0

    def group(self, process_set_id: int) -> Group:
        """Return the group of a process set that this rank is in."""
        with self._making:
            if process_set_id not in self._groups:
                group = Group(self.transport, self.ranks[process_set_id], self.choice)
                group.layout = layout_of(group, staging_segment(process_set_id), self.pass_spin_seconds)
                self._groups[process_set_id] = group
                if (small := _small_reductions_of(group)) is not None:
                    self.small_reductions[process_set_id] = small
            return self._groups[process_set_id]

    def device_collectives(self, process_set_id: int, device: str) -> DeviceCollectives | None:
        """Return the device's collectives of a process set's named operations. The first call is collective."""
        key = process_set_id, device
        if key not in self._device_collectives:
            here = self.device if self.device and self.device.partition(":")[0] == device else device
            self._device_collectives[key] = self.transport.collectives_for(
                here, self.ranks[process_set_id], f"set{process_set_id}"
            )
        return self._device_collectives[key]

    def remove(self, process_set_id: int) -> None:
        """Remove a set, as all ranks have agreed."""
        self.ranks.pop(process_set_id, None)
        group = self._groups.pop(process_set_id, None)
        if process_set_id in self.small_reductions:
            self.small_reductions.pop(process_set_id).leave()
        if group is not None and group.layout is not None and group.layout.staging is not None:
            group.layout.staging.leave()
        for key in [key for key in self._device_collectives if key[0] == process_set_id]:
            if (collectives := self._device_collectives.pop(key)) is not None:
                collectives.close()

    def end_join(self) -> None:
        """Note that all ranks have joined. If a plan was put off meanwhile, all ranks agree on their plans anew."""
        self.plan_epoch += self.plans_put_off
        self.plans_put_off = False

    def bytes_sent(self) -> int:
        """Return the bytes that this rank has sent in all present process sets. Any thread may call this."""
        return sum(group.bytes_sent for group in list(self._groups.values()))
