"""The process sets of this engine: their ranks, how these lie on nodes, and their collectives of a device."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from hvdkit.collectives.group import Choice, Group
from hvdkit.engine.ranks.repetitions import Repetitions
from hvdkit.engine.ranks.segments import layout_of, repetitions_of
from hvdkit.transports.base import DeviceCollectives, Transport


class Groups:
    """``ranks`` has the members of each process set by its number; 0 is everyone. The rest is made when needed."""

    def __init__(
        self, transport: Transport, static_process_sets: Sequence[list[int]], choice: Choice, pass_spin_seconds: float
    ) -> None:
        self.ranks: dict[int, list[int]] = {0: list(range(transport.size))}
        self.ranks.update(enumerate(static_process_sets, start=1))
        self.transport = transport
        self._choice = choice
        self._pass_spin_seconds = pass_spin_seconds
        self._groups: dict[int, Group] = {}
        self.repetitions: dict[int, Repetitions] = {}  # of those that have any
        self._making = threading.Lock()  # the driver and who registers gradients ask
        self.device: str | None = None  # ("cuda:0") that this rank's named operations have used last
        self._device_collectives: dict[tuple[int, str], DeviceCollectives | None] = {}
        # Whether a plan was put off since a rank has joined, and after how many joins that was so; alike on all ranks.
        self.plans_put_off = False
        self.plan_epoch = 0

    def group(self, process_set_id: int) -> Group:
        """The ranks of a process set that this rank is in."""
        with self._making:
            if process_set_id not in self._groups:
                group = Group(self.transport, self.ranks[process_set_id], self._choice)
                group.layout = layout_of(group, process_set_id, self._pass_spin_seconds)
                self._groups[process_set_id] = group
                repetitions = repetitions_of(group)
                if repetitions is not None:
                    self.repetitions[process_set_id] = repetitions
            return self._groups[process_set_id]

    def device_collectives(self, process_set_id: int, device: str) -> DeviceCollectives | None:
        """The collectives of a process set's named operations; all its ranks ask for the first time together."""
        key = process_set_id, device
        if key not in self._device_collectives:
            here = self.device if self.device and self.device.partition(":")[0] == device else device
            self._device_collectives[key] = self.transport.collectives_for(
                here, self.ranks[process_set_id], f"set{process_set_id}"
            )
        return self._device_collectives[key]

    def add(self, process_set_id: int, ranks: Sequence[int]) -> None:
        """All ranks have agreed on a set."""
        self.ranks[process_set_id] = list(ranks)

    def remove(self, process_set_id: int) -> None:
        """All ranks have agreed that there is no such set any more."""
        self.ranks.pop(process_set_id, None)
        group = self._groups.pop(process_set_id, None)
        if process_set_id in self.repetitions:
            self.repetitions.pop(process_set_id).leave()
        if group is not None and group.layout is not None and group.layout.staging is not None:
            group.layout.staging.leave()
        for key in [key for key in self._device_collectives if key[0] == process_set_id]:
            collectives = self._device_collectives.pop(key)
            if collectives is not None:
                collectives.close()

    def forget_repetitions(self) -> None:
        """From now on the coordinator is asked for each operation."""
        for repetitions in list(self.repetitions.values()):  # one that registers gradients may add to it
            repetitions.forget_all()

    def end_join(self) -> None:
        """All ranks have joined. Where a plan was put off meanwhile, all ranks agree on their plans anew."""
        self.plan_epoch += self.plans_put_off
        self.plans_put_off = False

    def bytes_sent(self) -> int:
        """What this rank has sent in all process sets that there are."""
        return sum(group.bytes_sent for group in list(self._groups.values()))  # any thread asks
