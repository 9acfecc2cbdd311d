"""The lanes of this rank, and the parts of the engine that they share."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING

from hvdkit.engine.loop.driver import Driver
from hvdkit.engine.loop.messages import Abandoned, LaneClosed, LaneFailed
from hvdkit.engine.loop.negotiation import Negotiation
from hvdkit.engine.loop.operation import Operation
from hvdkit.engine.loop.waiting import WaitingThreads
from hvdkit.engine.steps.schedule import Network, Sizes
from hvdkit.engine.telemetry.telemetry import Telemetry
from hvdkit.errors import HorovodInternalError, MismatchError

if TYPE_CHECKING:
    from hvdkit.engine.steps.lane import Lane

# How many closed lanes are remembered, for zeros while this rank has joined and others go on.
CLOSED_LANES = 64
# How many of them keep their communicator of a device, which takes the device's memory.
CLOSED_DEVICE_LANES = 4


class Lanes(dict[int, "Lane"]):
    """The open lanes, by number."""

    def __init__(
        self,
        driver: Driver,
        negotiation: Negotiation,
        telemetry: Telemetry,
        operations: list[Operation],
        network: Network,
        sizes: Sizes,
        waiting: WaitingThreads,
    ) -> None:
        super().__init__()
        self.driver, self.mailbox, self.telemetry, self.waiting = driver, negotiation.mailbox, telemetry, waiting
        self._negotiation = negotiation
        self.network, self.sizes = network, sizes
        self.warned_idle: set[str] = set()  # codecs for which a warning said that they encode nothing here
        self.closed: dict[int, Lane] = {}  # layouts only; others may still reduce by them while this rank has joined
        self._operations = operations
        self._opening = threading.Lock()
        self._opened: set[int] = set()  # the numbers of all lanes that were ever open
        self._abandoned_before: dict[int, list[tuple[int, int]]] = {}  # by lane that is not open yet: ranks and steps

    def open(self, lane: Lane) -> None:
        """Add a lane that was registered."""
        with self._opening:
            self[lane.lane_id] = lane
            self._opened.add(lane.lane_id)
            abandoned = self._abandoned_before.pop(lane.lane_id, ())
        for rank, step in abandoned:
            lane.abandonment.hear(rank, step)

    def find(self, lane_id: int) -> Lane | None:
        """Return the lane, also if it is closed."""
        return self.get(lane_id) or self.closed.get(lane_id)

    def everyone(self) -> list[Lane]:
        """Return all lanes, open or closed."""
        return [*self.values(), *self.closed.values()]

    def keep_closed(self, lane: Lane) -> None:
        """Remember a lane that was closed, and forget the oldest closed lanes."""
        if self.pop(lane.lane_id, None) is None:
            return
        self.closed[lane.lane_id] = lane
        for old in [lane for lane in self.closed.values() if lane.on_device][:-CLOSED_DEVICE_LANES]:
            old.reducer.close()
            del self.closed[old.lane_id]
        while len(self.closed) > CLOSED_LANES:
            self.closed.pop(next(iter(self.closed)))

    def give_number_back_later(self, lane: Lane) -> None:
        """Have the driver tell the coordinator, when it next runs, that a lane without open operations was closed."""

        def tell() -> None:
            if lane.is_left:
                self._negotiation.send_to_coordinator(LaneClosed(lane.lane_id, lane.sequence))

        self.driver.inbox.append(tell)

    def drop_later(self, operations: Iterable[Operation]) -> None:
        """Have the driver drop operations that may never end, because their lane failed."""

        def drop() -> None:
            dropped = set(operations)  # now: the driver alone changes them
            self._operations[:] = [operation for operation in self._operations if operation not in dropped]

        self.driver.defer(drop)

    def fail(self, error: HorovodInternalError) -> None:
        """End every wait on a lane with ``error``, also on lanes that were closed in the middle of a step."""
        for lane in self.everyone():
            lane.fail(error)

    def lane_failed(self, message: LaneFailed) -> None:
        """Act on the word of another rank that a lane has failed."""
        if (lane := self.find(message.lane)) is not None:
            lane.fail(MismatchError(message.text))

    def abandoned(self, sender: int, message: Abandoned, has_joined: bool) -> None:
        """Act on the word of ``sender`` that it does not use a step; ``has_joined``: this rank waits in join()."""
        with self._opening:
            lane = self.find(message.lane)
            if lane is None and message.lane not in self._opened:  # this rank has still to hear of the registration
                self._abandoned_before.setdefault(message.lane, []).append((sender, message.step))
        if lane is not None:
            lane.abandonment.hear(sender, message.step)
            if has_joined or (lane.closed and (lane.error is None or lane.abandonment.is_spent)):
                lane.abandonment.decline()
