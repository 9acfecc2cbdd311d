"""Join: a rank without data takes part with zeros in what the others reduce, until all ranks have joined."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hvdkit.engine.loop.messages import Join, LaneStarted
from hvdkit.engine.ops.batch import Handle
from hvdkit.errors import DuplicateNameError, HorovodInternalError

if TYPE_CHECKING:
    from hvdkit.engine.session.core import Engine
    from hvdkit.engine.steps.lane import Lane


class Joining:
    """The ranks that have joined, and this rank's own join.

    A lane is not negotiated, so a rank that starts an operation of a lane tells ranks that have joined to start it too.
    """

    def __init__(self, engine: Engine) -> None:
        self._negotiation = engine.negotiation
        self._mailbox = engine.mailbox
        self._rank = engine.topology.rank
        self._open_lanes = engine.lanes
        self._operations = engine.operations
        self._named = engine.named
        self._groups = engine.groups
        self.ranks: set[int] = set()  # that have joined
        self.followed: dict[int, Lane] = {}  # lanes on which this rank takes part with zeros
        self._handle: Handle | None = None
        self.last: int | None = None  # set between the end of a join and the end of its last zeros

    @property
    def waiting(self) -> bool:
        """True if this rank waits in join()."""
        return self._handle is not None

    def join(self, handle: Handle) -> None:
        """Announce that this rank has no more data; the result of ``handle`` is the last rank to join."""
        if self._handle is not None:
            raise DuplicateNameError("hvd.join() was called again while this rank is still joined.")
        self._handle = handle
        for lane in list(self._open_lanes.values()):
            lane.abandonment.decline()
        self._negotiation.send_later(Join())

    def tell_started(self, lane: Lane) -> None:
        """Tell the ranks that have joined how many operations of a lane were started here."""
        receivers = self.ranks.intersection(lane.group.members)
        self._mailbox.tell(receivers, LaneStarted(lane.lane_id, lane.sequence))

    def start_zeros(self) -> bool:
        """Start the operations with zeros that may start. True if there were any."""
        before = len(self._operations)
        for lane in self.followed.values():
            while lane.zeros_startable():
                self._operations.append(lane.start(joined=True))
        return len(self._operations) > before

    def end_if_over(self) -> None:
        """End the join if nothing of it is in flight."""
        if self.last is None or self._operations:
            return
        if self._handle is not None and all(lane.caught_up for lane in self.followed.values()):
            for lane in self.followed.values():
                if lane.closed:  # its memory was mapped anew for the zeros
                    lane.reducer.forget(quiet=True)
            self.followed.clear()
            self._groups.end_join()  # once all earlier agreements have ended here
            self._handle.finish(self.last)
            self._handle = self.last = None

    def fail(self, error: HorovodInternalError) -> None:
        """End this rank's join with ``error``."""
        if self._handle is not None:
            self._handle.fail(error)
            self._handle = None

    def joined(self, rank: int) -> None:
        """Note that a rank takes part with zeros, and tell it how far the lanes are that wait for it."""
        self.ranks.add(rank)
        if rank != self._rank:
            for lane in list(self._open_lanes.values()):
                if rank in lane.group.members and not lane.idle() and lane.sequence:
                    self._mailbox.tell([rank], LaneStarted(lane.lane_id, lane.sequence))

    def follow(self, message: LaneStarted) -> None:
        """Contribute zeros to the operations of a lane that other ranks have started."""
        lane = self._open_lanes.find(message.lane)
        if lane is not None and self._handle is not None:
            lane.joined_until = max(lane.joined_until, message.sequence)
            self.followed[message.lane] = lane

    def end(self, last: int) -> None:
        """Note that all ranks have joined. The join ends here when the last operation with zeros is over."""
        self.ranks.clear()
        self.last = last
        self._named.restart_counting()
