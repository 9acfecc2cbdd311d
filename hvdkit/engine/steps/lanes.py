"""The lanes of this rank, and what they have in common."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from hvdkit.engine.loop.driver import Driver
from hvdkit.engine.loop.messages import Abandoned, Ended, LaneClosed, LaneFailed
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


class Unended(Protocol):
    """Who has still to use the results of a lane's step."""

    def complete_all(self) -> None:
        """Wait for them and use them."""

    def give_up(self) -> None:
        """Use none of them."""


class Lanes(dict[int, "Lane"]):
    """The lanes that are open, by number."""

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
        self.told_idle: set[str] = set()  # codecs of which it was said that they encode nothing here
        self.closed: dict[int, Lane] = {}  # layouts only; others may still reduce by them while this rank has joined
        # What users of lanes have still to do with the results of a step whose end they did not wait for.
        self.unended: dict[Lane, Unended] = {}
        self._operations = operations

    def find(self, lane_id: int) -> Lane | None:
        """The lane, also if it is closed."""
        return self.get(lane_id) or self.closed.get(lane_id)

    def everyone(self) -> list[Lane]:
        """All that are open or closed."""
        return [*self.values(), *self.closed.values()]

    def keep_closed(self, lane: Lane) -> None:
        """Remember a lane that was closed, and forget what is too old."""
        if self.pop(lane.lane_id, None) is None:
            return
        self.closed[lane.lane_id] = lane
        for old in [one for one in self.closed.values() if one.on_device][:-CLOSED_DEVICE_LANES]:
            old.reducer.close()
            del self.closed[old.lane_id]
        while len(self.closed) > CLOSED_LANES:
            self.closed.pop(next(iter(self.closed)))

    def give_number_back_later(self, lane: Lane) -> None:
        """Have the driver tell the coordinator that a lane was closed, if nothing of it is open then.

        Nobody is woken for that: what is said before the next agreement is soon enough.
        """

        def tell() -> None:
            if lane.is_left:
                self._negotiation.send_to_coordinator(LaneClosed(lane.lane_id, lane.sequence))

        self.driver.inbox.append(tell)

    def end_steps(self) -> None:
        """This rank is about to join or to leave: have all users of lanes end their steps. Raises what that raises."""
        for user in list(self.unended.values()):
            user.complete_all()

    def give_up_steps(self) -> None:
        """Nothing can be waited for any more."""
        for user in list(self.unended.values()):
            user.give_up()

    def drop_later(self, operations: Iterable[Operation]) -> None:
        """Have the driver let go of what nobody waits for any more and may never end."""

        def drop() -> None:
            dropped = set(operations)
            self._operations[:] = [operation for operation in self._operations if operation not in dropped]

        self.driver.defer(drop)

    def fail(self, error: HorovodInternalError) -> None:
        """End every wait on a lane with ``error``; some were closed in the middle of a step."""
        for lane in self.everyone():
            lane.fail(error)

    def lane_failed(self, message: LaneFailed) -> None:
        lane = self.find(message.lane)
        if lane is not None:
            lane.fail(MismatchError(message.text))

    def abandoned(self, sender: int, message: Abandoned) -> None:
        lane = self.get(message.lane)
        if lane is not None:
            lane.abandoned_by(sender, message.step)

    def ended(self, sender: int, message: Ended) -> None:
        lane = self.find(message.lane)
        if lane is not None:
            lane.ended_by(sender, message.step)
