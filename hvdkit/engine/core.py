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
from hvdkit.engine.batches import Batches
from hvdkit.engine.buckets import DeviceBuckets, HostBuckets, Reduction
from hvdkit.engine.direct import DeviceArray
from hvdkit.engine.driver import Driver
from hvdkit.engine.ending import ENDING
from hvdkit.engine.execution import Submission
from hvdkit.engine.handle import Handle
from hvdkit.engine.joining import Joining
from hvdkit.engine.lane import Lane
from hvdkit.engine.messages import Message
from hvdkit.engine.named import NamedOperations
from hvdkit.engine.negotiation import Negotiation
from hvdkit.engine.operation import Operation
from hvdkit.engine.plan import Slot
from hvdkit.engine.requests import DATA_KINDS, Key, Signature
from hvdkit.engine.statistics import CommunicationStatistics, Statistics
from hvdkit.engine.topology import Topology
from hvdkit.engine.watch import Watch
from hvdkit.errors import DuplicateNameError, HorovodInternalError, PeerLostError
from hvdkit.kernels import ReduceOp
from hvdkit.transports.base import DeviceCollectives, Transport

if TYPE_CHECKING:
    from hvdkit.engine.timeline import Timeline

logger = logging.getLogger("hvdkit")

# How many closed plans are remembered; see Engine.forget_lane.
CLOSED_LANES = 64
# How many of them keep their communicator of a device, which takes the device's memory.
CLOSED_DEVICE_LANES = 4


class Engine(NamedOperations):
    """All collective communication of this process."""

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
        self.closed_lanes: dict[int, Lane] = {}  # layouts only; others may still reduce by them while this rank joins
        self.operations: list[Operation] = []
        self.submissions: dict[Key, Submission] = {}
        self._groups: dict[int, Group] = {}
        self._device_collectives: dict[tuple[int, str], DeviceCollectives | None] = {}
        self.place: str | None = None  # the device that this rank's named operations use
        self._inbox: deque[Callable[[], None]] = deque()
        self._automatic: dict[tuple[str, int], int] = {}
        self._submit_lock = threading.Lock()
        self.joining = Joining(self)
        self.batches = Batches(self)
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

    def join(self, place: str | None = None) -> Handle:
        """Take part in what others reduce, with zeros, until all ranks have joined; the result is the last to join.

        ``place``: the device for zeros where this rank has used none so far.
        """
        self.place = self.place or place
        return self.joining.join()

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
        place: str = "cpu",
    ) -> Lane:
        """Agree with all ranks of a process set on tensors that will be reduced together, step after step. Blocks.

        ``place``: the device ("cuda:0") on which slots shall live if the transport has collectives for it.
        Raises HorovodInternalError on every rank, naming the parameter, where the ranks differ.
        """
        signature = {
            "slots": [[slot.name, list(slot.shape), str(slot.dtype)] for slot in slots],
            "op": int(op),
            "prescale": float(prescale),
            "postscale": float(postscale),
            "codec": codec,
            "groups": [list(group) for group in groups],
            "device": device if (device := place.partition(":")[0]) in self.transport.device_types else "cpu",
        }
        lane_id = self._submit("plan", [], signature, None, name, process_set_id, False).wait()
        group, reduction = self.group(process_set_id), Reduction(op, prescale, postscale, codec)
        collectives = None
        if signature["device"] != "cpu" or "cpu" in self.transport.device_types:
            collectives = self.transport.collectives_for(place, group.members, f"lane{lane_id}")
        home = HostBuckets(group, reduction) if collectives is None else DeviceBuckets(group, reduction, collectives)
        lane = Lane(self, lane_id, name, slots, group, home, codec, groups)
        self.lanes[lane_id] = lane
        return lane

    def forget_lane(self, lane: Lane) -> None:
        if self.lanes.pop(lane.lane_id, None) is not None:
            self.closed_lanes[lane.lane_id] = lane
            for old in [one for one in self.closed_lanes.values() if one.on_device][:-CLOSED_DEVICE_LANES]:
                old.home.close()
                del self.closed_lanes[old.lane_id]
            while len(self.closed_lanes) > CLOSED_LANES:
                self.closed_lanes.pop(next(iter(self.closed_lanes)))

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

    def device_collectives(self, process_set_id: int, device: str) -> DeviceCollectives | None:
        """The collectives of a process set's named operations; all its ranks ask for the first time together."""
        key = process_set_id, device
        if key not in self._device_collectives:
            place = self.place if self.place and self.place.partition(":")[0] == device else device
            self._device_collectives[key] = self.transport.collectives_for(
                place, self.process_sets[process_set_id], f"set{process_set_id}"
            )
        return self._device_collectives[key]

    def communication_statistics(self) -> CommunicationStatistics:
        """What communication cost this rank since init."""
        return self.statistics.totals(sum(group.bytes_sent for group in self._groups.values()))

    def busy(self) -> bool:
        """Whether anything waits to be driven."""
        return bool(self._inbox or self.operations or self.submissions or self.joining.waiting)

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
        timeline = self.timeline  # another thread may stop it
        if timeline is not None:
            timeline.begin(row, activity, **args)

    def timeline_end(self, row: str) -> None:
        timeline = self.timeline
        if timeline is not None:
            timeline.end(row)

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

    def drive(self, handle: Handle) -> None:
        """Drive until an operation has ended."""
        with self.watch.waiting(handle, None):
            self._drive_until(handle.done)

    def _round(self) -> bool:
        """One pass over all that is in flight. Nothing is raised: an error ends every wait with itself."""
        try:
            return self._pass()
        except PeerLostError as error:
            if self.error is None:
                self.negotiation.tell_everyone(["lost", -1, str(error)])
            self.fail(error)
        except HorovodInternalError as error:
            self.fail(error)
        except Exception as error:  # a defect of ours: whoever waits must learn of it, on whatever thread it happens
            logger.exception("the engine failed on %s", self.told())
            self.fail(HorovodInternalError(f"the engine failed on {self.told()}: {error!r}"))
        return True

    def _pass(self) -> bool:
        moved = False
        while self._inbox:
            self._inbox.popleft()()
            moved = True
        moved |= self.negotiation.exchange()
        if self.error is not None:
            self.fail(self.error)  # also what was submitted while it failed
            return moved
        self.negotiation.look_for_broken()
        for lane in list(self.lanes.values()):
            while lane.startable():
                self.operations.append(lane.start())
                self.joining.tell_started(lane)
                moved = True
        moved |= self.joining.start_zeros()
        for operation in list(self.operations):
            moved |= self._advance(operation)
            if self.error is not None:
                return True
        self.joining.end_if_over()
        timeline = self.timeline
        if moved and timeline is not None:
            timeline.mark_cycle()
        self.watch.look(monotonic())
        return moved

    def _advance(self, operation: Operation) -> bool:
        try:
            moved = operation.advance()
        except PeerLostError as error:
            reason = self.negotiation.departed.get(-1 if error.rank is None else error.rank)
            how = f"{self.topology.told(error.rank or 0)} has left the job: {reason}" if reason else str(error)
            raise PeerLostError(f"{operation.what} failed on {self.told()}: {how}", error.rank) from error
        except Exception as error:
            raise HorovodInternalError(f"{operation.what} failed on {self.told()}: {error!r}") from error
        if moved and operation in self.operations:
            self.operations.remove(operation)
        return moved is not None

    def told(self) -> str:
        """This rank, for messages."""
        return self.topology.told(self.topology.rank)

    def fail(self, error: HorovodInternalError) -> None:
        """End every wait with ``error``: a rank is lost, or this one cannot go on."""
        if self.error is None:
            self.error = error
        for operation in self.operations:
            operation.fail(error)
        self.operations.clear()
        for lane in list(self.lanes.values()):
            lane.fail(error)
        with self._submit_lock:
            for submission in self.submissions.values():
                submission.handle.fail(error)
            self.submissions.clear()
        self.joining.fail(error)

    # -- what the coordinator decided ---------------------------------------------------------------------------------

    def reject(self, key: Key, text: str) -> None:
        """The coordinator found an error; this rank's request for ``key`` ends with it."""
        submission = self.submissions.pop(key, None)
        if submission is not None:
            self.timeline_end(str(key))
            submission.handle.fail(HorovodInternalError(text))

    def lane_failed(self, lane_id: int, text: str) -> None:
        lane = self.lanes.get(lane_id)
        if lane is not None:
            lane.fail(HorovodInternalError(text))

    def change_process_sets(self, kind: str, signature: Signature, result: Any) -> None:
        """All ranks have agreed to add or remove a set."""
        if kind == "add_process_set" and result is not None:
            self.process_sets[result] = list(signature["ranks"])
        elif kind == "remove_process_set":
            self.process_sets.pop(signature["id"], None)
            self._groups.pop(signature["id"], None)
            for key in [key for key in self._device_collectives if key[0] == signature["id"]]:
                collectives = self._device_collectives.pop(key)
                if collectives is not None:
                    collectives.close()

    def count_names_anew(self) -> None:
        """After a join: ranks have made different numbers of calls without a name; now they count together again."""
        self._automatic = {counted: count for counted, count in self._automatic.items() if counted[1] != 0}

    # -- inside -------------------------------------------------------------------------------------------------------

    def check_usable(self) -> None:
        """Raise HorovodInternalError where this engine cannot communicate any more."""
        if self.error is not None:
            raise HorovodInternalError(
                f"hvdkit cannot communicate any more: {self.error}\n"
                "HINT: call hvd.shutdown() and hvd.init() on all ranks that are left, or restart the job."
            ) from self.error

    def _submit(
        self,
        kind: str,
        arrays: Sequence[Array | DeviceArray],
        fields: Signature,
        detail: Any,
        name: str | None,
        process_set_id: int,
        wake: bool,
    ) -> Handle:
        self.check_usable()
        ENDING.forget()  # a script that goes on has caught its SystemExit
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
            for other in DATA_KINDS if kind in DATA_KINDS else (kind,):
                if Key(process_set_id, other, name) in self.submissions:
                    raise DuplicateNameError(
                        f"Requested to {kind} a tensor with the same name as another tensor that is currently being "
                        f"processed: {other} '{name}'.\n"
                        "HINT: synchronize() the first one, or give each tensor a name of its own."
                    )
            handle = Handle(str(key), label, self.drive)
            signature = {"kind": kind, "ps": process_set_id, **fields}
            submission = Submission(key, signature, list(arrays), detail, handle)
            self.submissions[key] = submission
            if arrays and isinstance(arrays[0], DeviceArray):
                self.place = arrays[0].place
        self.watch.seen_thread()
        self.timeline_begin(str(key), f"NEGOTIATE_{kind.upper()}")
        self._inbox.append(lambda: self.negotiation.announce(submission))
        if wake or self.transport.size == 1:
            self.wake()
        return handle
