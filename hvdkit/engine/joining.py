"""Join: a rank without data takes part with zeros in what the others reduce, until all ranks have joined."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hvdkit.engine.handle import Handle
from hvdkit.engine.messages import Join, LaneStarted
from hvdkit.errors import DuplicateNameError, HorovodInternalError

if TYPE_CHECKING:
    from hvdkit.engine.core import Engine
    from hvdkit.engine.lane import Lane


class Joining:
    """Which ranks have joined, and this rank's own join.

    Named operations need no more than the coordinator's word. A lane is not negotiated, so a rank that starts a bucket
    tells those that have joined how far the lane is, and they follow.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._ranks: set[int] = set()
        self._lanes: dict[int, Lane] = {}  # on which this rank takes part with zeros
        self._handle: Handle | None = None
        self.over = 0  # joins that have ended, counted alike by all ranks, which all wait for the end
        self._last: int | None = None  # set between the end of a join and the end of its last zeros

    @property
    def waiting(self) -> bool:
        """Whether this rank waits in join()."""
        return self._handle is not None

    def join(self) -> Handle:
        """Announce that this rank has no more data; the result is the last rank to join."""
        engine = self._engine
        engine.check_usable()
        if self._handle is not None:
            raise DuplicateNameError("hvd.join() was called again while this rank is still joined.")
        handle = self._handle = Handle("join()", None, engine.drive)
        engine.later(Join())
        return handle

    def tell_started(self, lane: Lane) -> None:
        """An operation of a lane was started here; ranks that have joined follow."""
        for rank in self._ranks.intersection(lane.group.members) - {self._engine.topology.rank}:
            self._engine.negotiation.send(rank, LaneStarted(lane.lane_id, lane.sequence))

    def joined(self, rank: int) -> None:
        """A rank takes part with zeros from now on; tell it how far the lanes are that wait for it."""
        self._ranks.add(rank)
        if rank != self._engine.topology.rank:
            for lane in list(self._engine.lanes.values()):
                if rank in lane.group.members and not lane.idle() and lane.sequence:
                    self._engine.negotiation.send(rank, LaneStarted(lane.lane_id, lane.sequence))

    def follow(self, lane_id: int, sequence: int) -> None:
        """Others have started a lane's operations up to here; this rank contributes zeros to them."""
        lane = self._engine.lanes.get(lane_id) or self._engine.closed_lanes.get(lane_id)
        if lane is not None and self._handle is not None:
            lane.joined_until = max(lane.joined_until, sequence)
            self._lanes[lane_id] = lane

    def start_zeros(self) -> bool:
        """Start what may start. True if anything did."""
        started = False
        for lane in self._lanes.values():
            while lane.zeros_startable():
                self._engine.operations.append(lane.start_zeros())
                started = True
        return started

    def done(self, last: int) -> None:
        """All ranks have joined. The join ends here when what this rank takes part in with zeros is over."""
        self._ranks.clear()
        self.over += 1
        self._engine.submissions.count_names_anew()
        self._last = last

    def end_if_over(self) -> None:
        """End the join once nothing of it is in flight."""
        if self._last is None or self._engine.operations:
            return
        if self._handle is not None and all(lane.caught_up for lane in self._lanes.values()):
            for lane in self._lanes.values():
                if lane.closed:  # its memory was mapped anew for the zeros
                    lane.home.forget(quiet=True)
            self._lanes.clear()
            self._handle.finish(self._last)
            self._handle = self._last = None

    def fail(self, error: HorovodInternalError) -> None:
        """The join can never end."""
        if self._handle is not None:
            self._handle.fail(error)
            self._handle = None
