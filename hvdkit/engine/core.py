"""The engine of one process: takes requests, drives what is in flight, ends every wait with a result or an error."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any

from hvdkit.collectives.group import Array, Group
from hvdkit.config import Settings
from hvdkit.engine.driver import Driver
from hvdkit.engine.execution import TAGS_PER_OPERATION, Submission, execute, zeros_for
from hvdkit.engine.handle import Handle
from hvdkit.engine.lane import Lane, Reduction
from hvdkit.engine.messages import Message
from hvdkit.engine.named import NamedOperations
from hvdkit.engine.negotiation import Negotiation
from hvdkit.engine.operation import Operation
from hvdkit.engine.plan import Slot
from hvdkit.engine.requests import Key, Signature
from hvdkit.engine.statistics import CommunicationStatistics, Statistics
from hvdkit.engine.topology import Topology
from hvdkit.engine.watch import Watch
from hvdkit.errors import DuplicateNameError, HorovodInternalError, PeerLostError
from hvdkit.kernels import ReduceOp
from hvdkit.transports.base import Transport

if TYPE_CHECKING:
    from hvdkit.engine.timeline import Timeline

logger = logging.getLogger("hvdkit")

# How many closed plans are remembered; see Engine.forget_lane.
CLOSED_LANES = 64
# Named operations count their tags below those of lanes; see lane.LANE_TAG.
NAMED_SEQUENCES = (1 << 21) // TAGS_PER_OPERATION


class Engine(NamedOperations):
    """All collective communication of this process. Arrays are numpy arrays, C-contiguous."""

    def __init__(
        self, transport: Transport, topology: Topology, settings: Settings, static_process_sets: Sequence[list[int]]
    ) -> None:
        self.transport = transport
        self.topology = topology
        self.settings = settings
        self.statistics = Statistics()
        self.process_sets: dict[int, list[int]] = {0: list(range(transport.size))}
        self.process_sets.update(enumerate(static_process_sets, start=1))
        self.timeline: Timeline | None = None
        self.error: HorovodInternalError | None = None  # why nothing works any more
        self.lanes: dict[int, Lane] = {}
        self._closed_lanes: dict[int, Lane] = {}  # layouts only; others may still reduce by them while this rank joins
        self._joined_lanes: dict[int, Lane] = {}  # lanes on which this rank takes part with zeros
        self.operations: list[Operation] = []
        self.submissions: dict[Key, Submission] = {}
        self._groups: dict[int, Group] = {}
        self._inbox: deque[Callable[[], None]] = deque()
        self._automatic: dict[tuple[str, int], int] = {}
        self._join_handle: Handle | None = None
        self._joined: set[int] = set()
        self._submit_lock = threading.Lock()
        self.negotiation = Negotiation(self, static_process_sets)
        self.watch = Watch(self)
        self.driver = Driver(
            self._round,
            self.busy,
            transport.polling,
            settings.spin_microseconds * 1e-6,
            settings.cycle_time_ms * 1e-3,
            settings.idle_poll_ms * 1e-3,
        )
        if transport.size > 1:
            transport.set_waker(self.driver.wake)
            self.driver.start()

    # -- joining -----------------------------------------------------------------------------------------------------

    def join(self) -> Handle:
        """Take part in what others reduce, with zeros, until all ranks have joined; the result is the last to join."""
        self._check_usable()
        if self._join_handle is not None:
            raise DuplicateNameError("hvd.join() was called again while this rank is still joined.")
        handle = self._join_handle = Handle("join()", None, self._drive)
        self._inbox.append(lambda: self.negotiation.send_to_coordinator(["join"]))
        self.wake()
        return handle

    # -- plans --------------------------------------------------------------------------------------------------------

    def register_plan(
        self,
        name: str,
        slots: Sequence[Slot],
        *,
        op: ReduceOp,
        prescale: float = 1.0,
        postscale: float = 1.0,
        codec: str = "none",
        process_set_id: int = 0,
        groups: Sequence[Sequence[int]] = (),
    ) -> Lane:
        """Agree with all ranks of a process set on tensors that will be reduced together, step after step. Blocks.

        Raises HorovodInternalError on every rank, naming the parameter, where the ranks differ.
        """
        signature = {
            "slots": [[slot.name, list(slot.shape), str(slot.dtype)] for slot in slots],
            "op": int(op),
            "prescale": float(prescale),
            "postscale": float(postscale),
            "codec": codec,
            "groups": [list(group) for group in groups],
        }
        lane_id = self._submit("plan", [], signature, None, name, process_set_id, False).wait()
        lane = Lane(
            self, lane_id, name, slots, self.group(process_set_id), Reduction(op, prescale, postscale, codec), groups
        )
        self.lanes[lane_id] = lane
        return lane

    def forget_lane(self, lane: Lane) -> None:
        if self.lanes.pop(lane.lane_id, None) is not None:
            self._closed_lanes[lane.lane_id] = lane
            while len(self._closed_lanes) > CLOSED_LANES:
                self._closed_lanes.pop(next(iter(self._closed_lanes)))

    def drive_lane(self, lane: Lane) -> None:
        """Drive until every bucket of the lane's step is reduced or the lane has failed."""
        with self.watch.waiting(None, lane):
            self._drive_until(lane.idle)

    # -- facts --------------------------------------------------------------------------------------------------------

    def group(self, process_set_id: int) -> Group:
        """The ranks of a process set that this rank is in."""
        if process_set_id not in self._groups:
            self._groups[process_set_id] = Group(self.transport, self.process_sets[process_set_id])
        return self._groups[process_set_id]

    def communication_statistics(self) -> CommunicationStatistics:
        """What communication cost this rank since init."""
        return self.statistics.totals(sum(group.bytes_sent for group in self._groups.values()))

    def busy(self) -> bool:
        """Whether anything waits to be driven."""
        return bool(self._inbox or self.operations or self.submissions or self._join_handle)

    # -- timeline -----------------------------------------------------------------------------------------------------

    def start_timeline(self, path: str, mark_cycles: bool) -> None:
        """Begin recording on rank 0, in place of what was being recorded."""
        self.stop_timeline()
        if self.topology.rank == 0:
            from hvdkit.engine.timeline import Timeline

            self.timeline = Timeline(path, self.topology.rank, mark_cycles)

    def stop_timeline(self) -> None:
        timeline, self.timeline = self.timeline, None
        if timeline is not None:
            timeline.close()

    def timeline_begin(self, row: str, activity: str, **args: Any) -> None:
        if self.timeline is not None:
            self.timeline.begin(row, activity, **args)

    def timeline_end(self, row: str) -> None:
        if self.timeline is not None:
            self.timeline.end(row)

    def later(self, message: Message) -> None:
        """Have the driver tell the coordinator something."""
        self.defer(lambda: self.negotiation.send_to_coordinator(message))

    def defer(self, action: Callable[[], None]) -> None:
        """Have the driver do something in its next round."""
        self._inbox.append(action)
        self.wake()

    # -- driving ------------------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Have what was submitted looked at soon; a rank alone looks at it now."""
        if self.transport.size == 1:
            self._drive_until(lambda: not self._inbox)
        else:
            self.driver.wake()

    def _drive_until(self, finished: Callable[[], bool]) -> None:
        self.statistics.waited(self.driver.drive_until(finished))

    def _drive(self, handle: Handle) -> None:
        with self.watch.waiting(handle, None):
            self._drive_until(handle.done)

    def _round(self) -> bool:
        """One pass over all that is in flight. Errors end what they concern; nothing is raised."""
        moved = False
        while self._inbox:
            self._inbox.popleft()()
            moved = True
        try:
            moved |= self.negotiation.exchange()
            self.negotiation.look_for_broken()
            for lane in list(self.lanes.values()):
                while lane.startable():
                    self._start_on(lane, lane.start())
                    moved = True
            for lane in self._joined_lanes.values():
                while lane.zeros_startable():
                    self.operations.append(lane.start_zeros())
                    moved = True
            for operation in list(self.operations):
                moved |= self._advance(operation)
        except PeerLostError as error:
            if self.error is None:
                self.negotiation.tell_everyone(["lost", -1, str(error)])
            self.fail(error)
        if moved and self.timeline is not None:
            self.timeline.mark_cycle()
        self.watch.look(monotonic())
        return moved

    def _start_on(self, lane: Lane, operation: Operation) -> None:
        self.operations.append(operation)
        for rank in self._joined.intersection(lane.group.members) - {self.topology.rank}:
            self.negotiation.send(rank, ["lane", lane.lane_id, lane.sequence])

    def _advance(self, operation: Operation) -> bool:
        try:
            moved = operation.advance()
        except PeerLostError as error:
            reason = self.negotiation.departed.get(-1 if error.rank is None else error.rank)
            how = f"{self.topology.told(error.rank or 0)} has left the job: {reason}" if reason else str(error)
            raise PeerLostError(f"{operation.what} failed on {self.told()}: {how}", error.rank) from error
        except Exception as error:
            logger.exception("%s failed on %s", operation.what, self.told())
            self.operations.remove(operation)
            self.fail(HorovodInternalError(f"{operation.what} failed on {self.told()}: {error!r}"))
            return True
        if moved:
            self.operations.remove(operation)
        return moved is not None

    def told(self) -> str:
        """This rank, for messages."""
        return self.topology.told(self.topology.rank)

    def fail(self, error: HorovodInternalError) -> None:
        """End every wait with ``error``: a rank is lost, or this one cannot go on."""
        if self.error is None:
            self.error = error
        self.operations.clear()
        for lane in self.lanes.values():
            lane.fail(error)
        for submission in self.submissions.values():
            submission.handle.fail(error)
        self.submissions.clear()
        if self._join_handle is not None:
            self._join_handle.fail(error)
            self._join_handle = None

    # -- what the coordinator decided ---------------------------------------------------------------------------------

    def run(self, message: Message) -> None:
        """Start a batch that all ranks run under the same sequence number."""
        _, sequence, process_set_id, kind, names, signatures = message
        submissions = []
        for index, (name, _) in enumerate(names):
            key = Key(process_set_id, kind, name)
            submission = self.submissions.pop(key, None)
            if submission is None:
                assert signatures is not None, f"{key} runs, but this rank neither asked for it nor joined"
                arrays = zeros_for(signatures[index]) if kind == "allreduce" else []
                submission = Submission(key, signatures[index], arrays, None, Handle(str(key), None, self._drive))
            submissions.append(submission)
            self.timeline_end(str(key))
            self.timeline_begin(str(key), kind.upper())
        group = self.group(process_set_id)
        root = submissions[0].signature.get("root", self.process_sets[process_set_id][0])
        extras = [extra for _, extra in names]
        tag = sequence % NAMED_SEQUENCES * TAGS_PER_OPERATION
        steps = execute(group, kind, submissions, extras, group.members.index(root), tag)

        def completed(results: list[Any]) -> None:
            if kind in ("add_process_set", "remove_process_set"):
                self._change_process_sets(kind, submissions[0].signature, results)
            for submission, result in zip(submissions, results, strict=True):
                self.timeline_end(str(submission.key))
                submission.handle.finish(result)

        what = submissions[0].handle.what + (f" and {len(submissions) - 1} more" if len(submissions) > 1 else "")
        self.operations.append(Operation(what, steps, self.transport, completed))

    def _change_process_sets(self, kind: str, signature: Signature, results: list[Any]) -> None:
        if kind == "add_process_set" and results[0] is not None:
            self.process_sets[results[0]] = list(signature["ranks"])
        elif kind == "remove_process_set":
            self.process_sets.pop(signature["id"], None)
            self._groups.pop(signature["id"], None)

    def reject(self, key: Key, text: str) -> None:
        """The coordinator found an error; this rank's request for ``key`` ends with it."""
        submission = self.submissions.pop(key, None)
        if submission is not None:
            self.timeline_end(str(key))
            submission.handle.fail(HorovodInternalError(text))

    def joined(self, rank: int) -> None:
        """A rank takes part with zeros from now on; tell it how far the lanes are that wait for it."""
        self._joined.add(rank)
        if rank != self.topology.rank:
            for lane in self.lanes.values():
                if rank in lane.group.members and not lane.idle() and lane.sequence:
                    self.negotiation.send(rank, ["lane", lane.lane_id, lane.sequence])

    def join_done(self, last: int) -> None:
        self._joined.clear()
        self._joined_lanes.clear()
        # Ranks have made different numbers of calls without a name; from here on they count together again.
        self._automatic = {counted: count for counted, count in self._automatic.items() if counted[1] != 0}
        if self._join_handle is not None:
            self._join_handle.finish(last)
            self._join_handle = None

    def take_part(self, lane_id: int, sequence: int) -> None:
        """Contribute zeros to a lane up to an operation that others have started."""
        lane = self.lanes.get(lane_id) or self._closed_lanes.get(lane_id)
        if lane is not None and self._join_handle is not None:
            lane.joined_until = max(lane.joined_until, sequence)
            self._joined_lanes[lane_id] = lane

    def lane_failed(self, lane_id: int, text: str) -> None:
        lane = self.lanes.get(lane_id)
        if lane is not None:
            lane.fail(HorovodInternalError(text))

    # -- inside -------------------------------------------------------------------------------------------------------

    def _check_usable(self) -> None:
        if self.error is not None:
            raise HorovodInternalError(
                f"hvdkit cannot communicate any more: {self.error}\n"
                "HINT: call hvd.shutdown() and hvd.init() on all ranks that are left, or restart the job."
            ) from self.error

    def _submit(
        self,
        kind: str,
        arrays: Sequence[Array],
        fields: Signature,
        detail: Any,
        name: str | None,
        process_set_id: int,
        wake: bool,
    ) -> Handle:
        self._check_usable()
        members = self.process_sets.get(process_set_id)
        if members is None or self.topology.rank not in members:
            there = "does not exist" if members is None else f"has the ranks {members}"
            raise ValueError(
                f"{kind}: rank {self.topology.rank} is not in process set {process_set_id}, which {there}.\n"
                "HINT: call it only where process_set.included() is true."
            )
        with self._submit_lock:
            label = name
            if name is None:
                number = self._automatic[kind, process_set_id] = self._automatic.get((kind, process_set_id), -1) + 1
                name = f"{kind}.noname.{number}"
            key = Key(process_set_id, kind, name)
            if key in self.submissions:
                raise DuplicateNameError(
                    f"Requested to {kind} a tensor with the same name as another tensor that is currently being "
                    f"processed: '{name}'.\nHINT: synchronize() the first one, or give each tensor a name of its own."
                )
            handle = Handle(str(key), label, self._drive)
            signature = {"kind": kind, "ps": process_set_id, **fields}
            submission = Submission(key, signature, list(arrays), detail, handle)
            self.submissions[key] = submission
        self.watch.seen_thread()
        self.timeline_begin(str(key), f"NEGOTIATE_{kind.upper()}")
        self._inbox.append(lambda: self.negotiation.announce(submission))
        if wake or self.transport.size == 1:
            self.wake()
        return handle
