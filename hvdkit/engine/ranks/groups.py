"""The process sets of this engine: their ranks, the node memory that these share, and their device's collectives.

Segments of a node's memory: 0 is the transport's, odd segments are process sets', even ones lanes'.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from hvdkit.collectives.group import Choice, Group
from hvdkit.collectives.hierarchical import Layout
from hvdkit.collectives.staging import Staging, staging_bytes
from hvdkit.engine.ranks.repetitions import REGIONS, Repetitions, most_bytes
from hvdkit.transports.base import Transport
from hvdkit.transports.node import has_segment

if TYPE_CHECKING:
    from hvdkit.transports.gpu.device import DeviceCollectives


def staging_segment(process_set_id: int) -> int:
    """Return the segment in which the ranks of a process set stage tensors."""
    return 2 * process_set_id + 1


def lane_segment(lane_id: int) -> int:
    """Return the segment of a lane's buckets."""
    return 2 * lane_id + 2


def group_bytes(ranks: int) -> int:
    """Return the bytes that ``ranks`` ranks of a process set on one node share: staging, and recurring operations."""
    from hvdkit.kernels._native import Repeated

    return staging_bytes(ranks) + Repeated.bytes_needed(ranks, REGIONS, most_bytes(ranks))


def _layout_of(group: Group, process_set_id: int, spin_seconds: float) -> Layout | None:
    """Return a process set's layout on nodes; None if no two ranks share memory, or earlier sets took all segments."""
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


def _repetitions_of(group: Group) -> Repetitions | None:
    """Return the recurring operations of a process set, or None unless all its ranks share memory, each with a core."""
    staging = None if group.layout is None else group.layout.staging
    if staging is None or len(staging.members) < group.size or staging.spin_seconds == 0:
        return None
    from hvdkit.kernels._native import Repeated

    begin, most = staging_bytes(group.size), most_bytes(group.size)
    area = Repeated(staging.window, begin, group.size, group.rank, REGIONS, most)
    nbytes = Repeated.bytes_needed(group.size, REGIONS, most)
    return Repetitions(group, area, most, partial(staging.window.give_back, begin, nbytes))


class Groups:
    """The members of each process set (``ranks``, by number; 0 is everyone), and their groups, made when needed."""

    def __init__(
        self, transport: Transport, static_process_sets: Sequence[list[int]], choice: Choice, pass_spin_seconds: float
    ) -> None:
        self.ranks: dict[int, list[int]] = {0: list(range(transport.size))}
        self.ranks.update(enumerate(static_process_sets, start=1))
        self.transport, self._choice, self._pass_spin_seconds = transport, choice, pass_spin_seconds
        self._groups: dict[int, Group] = {}
        self.repetitions: dict[int, Repetitions] = {}  # of the process sets that have any
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
                group = Group(self.transport, self.ranks[process_set_id], self._choice)
                group.layout = _layout_of(group, process_set_id, self._pass_spin_seconds)
                self._groups[process_set_id] = group
                if (repetitions := _repetitions_of(group)) is not None:
                    self.repetitions[process_set_id] = repetitions
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
        if process_set_id in self.repetitions:
            self.repetitions.pop(process_set_id).leave()
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
