"""Join: a rank without data takes part with zeros in what the others reduce, until all ranks have joined."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hvdkit.engine.loop.messages import Join, JoinDone, Joined, JoinFailed, LaneStarted
from hvdkit.engine.loop.negotiation import Negotiation
from hvdkit.engine.loop.operation import Operation
from hvdkit.engine.ops.handle import Handle
from hvdkit.engine.ops.submissions import Submissions
from hvdkit.engine.ranks.groups import Groups
from hvdkit.engine.steps.lanes import Lanes
from hvdkit.errors import DuplicateNameError, HorovodInternalError, PeerLostError

if TYPE_CHECKING:
    from hvdkit.engine.steps.lane import Lane


class Joining:
    """Which ranks have joined, and this rank's own join.

    Named operations need no more than the coordinator's word. A lane is not negotiated, so a rank that starts a bucket
    tells those that have joined how far the lane is, and they follow.
    """

    def __init__(
        self,
        negotiation: Negotiation,
        lanes: Lanes,
        submissions: Submissions,
        operations: list[Operation],
        groups: Groups,
    ) -> None:
        self._groups = groups
        self._negotiation, self._mailbox = negotiation, negotiation.mailbox
        self._open_lanes, self._submissions, self._operations = lanes, submissions, operations
        self._rank = self._mailbox.topology.rank
        self._ranks: set[int] = set()
        self.followed: dict[int, Lane] = {}  # lanes on which this rank takes part with zeros
        self._handle: Handle | None = None
        self.over = 0  # joins that have ended, counted alike by all ranks, which all wait for the end
        self.last: int | None = None  # set between the end of a join and the end of its last zeros
        self._mailbox.handlers.update(
            {Joined: self._joined, JoinDone: self._done, JoinFailed: self._join_failed, LaneStarted: self._follow}
        )

    @property
    def waiting(self) -> bool:
        """Whether this rank waits in join()."""
        return self._handle is not None

    def join(self, handle: Handle) -> None:
        """Announce that this rank has no more data; the result of ``handle`` is the last rank to join."""
        if self._handle is not None:
            raise DuplicateNameError("hvd.join() was called again while this rank is still joined.")
        self._handle = handle
        self._negotiation.later(Join())

    def tell_started(self, lane: Lane) -> None:
        """An operation of a lane was started here; ranks that have joined follow."""
        for rank in self._ranks.intersection(lane.group.members) - {self._rank}:
            self._mailbox.tell([rank], LaneStarted(lane.lane_id, lane.sequence))

    def start_zeros(self) -> bool:
        """Start what may start. True if anything did."""
        started = False
        for lane in self.followed.values():
            while lane.zeros_startable():
                self._operations.append(lane.start(joined=True))
                started = True
        return started

    def end_if_over(self) -> None:
        """End the join once nothing of it is in flight."""
        if self.last is None or self._operations:
            return
        if self._handle is not None and all(lane.caught_up for lane in self.followed.values()):
            for lane in self.followed.values():
                if lane.closed:  # its memory was mapped anew for the zeros
                    lane.reducer.forget(quiet=True)
            self.followed.clear()
            self._groups.end_join()  # when all agreements of before have ended here
            self._handle.finish(self.last)
            self._handle = self.last = None

    def fail(self, error: HorovodInternalError) -> None:
        """The join can never end."""
        if self._handle is not None:
            self._handle.fail(error)
            self._handle = None

    # -- what others tell ---------------------------------------------------------------------------------------------

    def _joined(self, sender: int, message: Joined) -> None:
        """A rank takes part with zeros from now on; tell it how far the lanes are that wait for it."""
        rank = message.rank
        self._ranks.add(rank)
        self._groups.forget_repetitions()
        if rank != self._rank:
            for lane in list(self._open_lanes.values()):
                if rank in lane.group.members and not lane.idle() and lane.sequence:
                    self._mailbox.tell([rank], LaneStarted(lane.lane_id, lane.sequence))

    def _follow(self, sender: int, message: LaneStarted) -> None:
        """Others have started a lane's operations up to here; this rank contributes zeros to them."""
        lane = self._open_lanes.find(message.lane)
        if lane is not None and self._handle is not None:
            lane.joined_until = max(lane.joined_until, message.sequence)
            self.followed[message.lane] = lane

    def _done(self, sender: int, message: JoinDone) -> None:
        """All ranks have joined. The join ends here when what this rank takes part in with zeros is over."""
        self._ranks.clear()
        self.over += 1
        self._submissions.count_names_anew()
        self.last = message.rank

    def _join_failed(self, sender: int, message: JoinFailed) -> None:
        self.fail(PeerLostError(message.text))
