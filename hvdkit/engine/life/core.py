"""The engine of one session: takes requests, drives what is in flight, ends every wait with a result or an error."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from functools import partial
from threading import get_ident
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Any

from hvdkit.collectives.group import Array, Choice
from hvdkit.compression import CASTS, Codec
from hvdkit.config import Settings
from hvdkit.engine.life.joining import Joining
from hvdkit.engine.life.watch import Watch
from hvdkit.engine.loop.batches import Batches
from hvdkit.engine.loop.driver import Driver, spin_seconds
from hvdkit.engine.loop.mailbox import Mailbox
from hvdkit.engine.loop.messages import Lost
from hvdkit.engine.loop.negotiation import Negotiation
from hvdkit.engine.loop.operation import Operation
from hvdkit.engine.loop.wakeup import new_wakeup
from hvdkit.engine.ops import Submission
from hvdkit.engine.ops.device_operations import DeviceArray
from hvdkit.engine.ops.handle import Handle
from hvdkit.engine.ops.named import NamedOperations
from hvdkit.engine.ops.requests import Call, ReduceRequest, Signature
from hvdkit.engine.ops.submissions import Submissions, duplicate_name
from hvdkit.engine.ranks.groups import Groups
from hvdkit.engine.ranks.topology import Topology
from hvdkit.engine.steps.lane import Lane
from hvdkit.engine.steps.lanes import Lanes
from hvdkit.engine.steps.plan import Plan, Reduction, Slot
from hvdkit.engine.steps.registration import register
from hvdkit.engine.steps.schedule import Network, choose_sizes
from hvdkit.engine.telemetry.compression_report import CompressionStatistics, compression_statistics
from hvdkit.engine.telemetry.liveness import Liveness
from hvdkit.engine.telemetry.statistics import CommunicationStatistics
from hvdkit.engine.telemetry.telemetry import Telemetry
from hvdkit.errors import (
    ForkedChildError,
    HorovodInternalError,
    PayloadError,
    PeerFailedError,
    PeerLostError,
    in_words,
)
from hvdkit.kernels import ReduceOp
from hvdkit.transports.base import Transport

if TYPE_CHECKING:
    from hvdkit.kernels._native import Heartbeat

logger = logging.getLogger("hvdkit")

# How long a pass over shared memory watches the other ranks before the engine looks at other operations.
PASS_SPIN_SECONDS = 20e-6
# How long an error that names no rank, as those of a device's library, waits for a goodbye or a broken connection.
NAMELESS_SECONDS = 5.0


class Engine(NamedOperations):
    """All collective communication of this rank in its job. It makes its parts; none of them knows it."""

    def __init__(
        self,
        transport: Transport,
        topology: Topology,
        settings: Settings,
        network: Network,
        static_process_sets: Sequence[list[int]],
        early: list[tuple[int, bytes]],
        heartbeat: Heartbeat | None = None,
        going_on: Callable[[], None] | None = None,
    ) -> None:
        self.transport = transport
        self._going_on = going_on
        self.topology = topology
        self.settings = settings
        self.error: HorovodInternalError | None = None  # why nothing works any more
        self.operations: list[Operation] = []
        self.submissions = Submissions()
        self._process = os.getpid()
        self.telemetry = Telemetry(topology.rank)
        spin = spin_seconds(settings.spin_microseconds * 1e-6, transport, topology)
        self.driver = Driver(
            self._round,
            self.busy,
            transport.wakeup or new_wakeup(),
            transport.polling,
            spin,
            settings.cycle_time_ms * 1e-3,
            settings.idle_poll_ms * 1e-3,
            self.telemetry.statistics.waited,
            alone=transport.size == 1,
        )
        choice = Choice(settings.allreduce, network.latency_seconds, network.seconds_per_byte)
        self.groups = Groups(transport, static_process_sets, choice, min(spin, PASS_SPIN_SECONDS))
        sizes = choose_sizes(
            network, settings.fusion_threshold, settings.max_bytes_in_flight, transport.worthwhile_bytes
        )
        liveness = Liveness(settings.timeout_seconds, settings.longest_unresponsive_seconds)
        self.mailbox = Mailbox(transport, topology, liveness, self.driver.defer, early)
        self.mailbox.handlers[Lost] = self._lost
        self.negotiation = Negotiation(
            self.mailbox,
            transport,
            sizes.bucket,
            settings.cache_capacity,
            static_process_sets,
            self.telemetry,
        )
        self.lanes = Lanes(self.driver, self.negotiation, self.telemetry, self.operations, network, sizes, self._drive)
        self.joining = Joining(self.negotiation, self.lanes, self.submissions, self.operations, self.groups)
        self.batches = Batches(self.mailbox, self.groups, self.submissions, self.operations, self.telemetry)
        self.watch = Watch(settings, heartbeat, self.negotiation, self.joining, self.submissions, self.operations)
        if transport.size > 1:
            transport.set_waker(self.driver.wake)
            self.driver.start()

    def join(self, device: str | None = None) -> Handle:
        """Take part in what others reduce, with zeros, until all ranks have joined; the result is the last to join.

        ``device``: the device for zeros where this rank has used none so far.
        """
        self.lanes.end_steps()
        self.check_usable()
        self.groups.device = self.groups.device or device
        handle = Handle("join()", None, self._drive)
        self.joining.join(handle)
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
        codecs: Sequence[Codec] = (CASTS["none"],),
        process_set_id: int = 0,
        groups: Sequence[Sequence[int]] = (),
        device: str = "cpu",
        overlaps_forward: bool = False,
    ) -> Lane | None:
        """Agree with all ranks of a process set on tensors that will be reduced together, step after step. Blocks.

        Returns None where a rank has joined, which has nothing to agree on: until all ranks have, gradients go by name.

        ``codecs``: those that slots number. ``device``: the one ("cuda:0") on which slots shall live if the transport
        has collectives for it. ``overlaps_forward``: see Plan.
        Raises HorovodInternalError on every rank, naming the parameter, where the ranks differ.
        """
        self.lanes.end_steps()  # of optimizers that nobody may use any more
        reduction = Reduction(op, float(prescale), float(postscale), tuple(codecs))
        plan = Plan(name, list(slots), reduction, process_set_id, groups, device, bool(overlaps_forward))
        lane = register(self, self.topology, self.settings, self.lanes, plan)
        if lane is not None:
            self.lanes[lane.lane_id] = lane
        return lane

    # -- facts --------------------------------------------------------------------------------------------------------

    def communication_statistics(self) -> CommunicationStatistics:
        """What communication cost this rank since init."""
        return self.telemetry.statistics.totals(self.groups.bytes_sent())

    def compression_statistics(self) -> CompressionStatistics:
        """What compression did on this rank since init."""
        reports = ((lane.name, lane.reducer.reports()) for lane in list(self.lanes.values()))
        return compression_statistics(reports, self.telemetry.statistics.encoded_by_name())

    def busy(self) -> bool:
        """Whether anything waits to be driven, or is looked for so that the timeline has the time at which it came."""
        return bool(
            self.driver.inbox
            or self.operations
            or self.submissions
            or self.joining.waiting
            or self.mailbox.relay.held
            or self.telemetry.timeline is not None
        )

    # -- driving ------------------------------------------------------------------------------------------------------

    def _drive(self, what: Handle | Lane, finished: Callable[[], bool]) -> None:
        """Drive until ``finished()``, which ``what`` of the calling thread waits for."""
        if os.getpid() != self._process:
            raise ForkedChildError(self.mailbox.me(), self._process)
        self.watch.begin_waiting(what)
        try:
            self.driver.drive_until(finished)
        finally:
            self.watch.end_waiting()

    def _round(self) -> bool:
        """One pass over all that is in flight. Nothing is raised: an error ends every wait with itself."""
        broken = self.error is not None
        try:
            return self._pass()
        except HorovodInternalError as error:
            failure = error
        except Exception as error:  # a defect of ours: whoever waits must learn of it, on whatever thread it happens
            if not broken:
                logger.exception("the engine failed on %s", self.mailbox.me())
            failure = HorovodInternalError(f"the engine failed on {self.mailbox.me()}: {in_words(error)}")
            failure.__cause__ = error
        except BaseException as error:  # Ctrl-C in the middle of a sum: nobody can know how far it is
            self._break(HorovodInternalError(f"{self.mailbox.me()} was interrupted by {type(error).__name__}"), broken)
            raise
        self._break(failure, broken)
        return not broken

    def _break(self, failure: HorovodInternalError, broken: bool) -> None:
        """Nothing goes on here after ``failure``; the others would wait for this rank."""
        if not broken:
            lost = set(self.transport.lost_peers())
            told = Lost(self.topology.rank, True, str(failure))
            if isinstance(failure, PeerLostError):
                told = Lost(failure.rank, False, str(failure))
                lost.update([] if failure.rank is None else [failure.rank])
            self.mailbox.look_for_detours(lost, monotonic())
            self.mailbox.tell_everyone(told)
        self.fail(failure)

    def _pass(self) -> bool:
        moved, inbox = False, self.driver.inbox
        while inbox:
            inbox.popleft()()
            moved = True
        moved |= self.transport.advance()
        moved |= self.negotiation.exchange()
        if self.error is not None:
            self.fail(self.error)  # also what was submitted while it failed
            return moved
        lost = self.transport.lost_peers()
        if lost:
            self.negotiation.look_for_broken(lost)
            self.mailbox.look_for_detours(lost, monotonic())
        for lane in list(self.lanes.values()):
            while lane.startable():
                self.operations.append(lane.start())
                self.joining.tell_started(lane)
                moved = True
        if self.joining.followed:
            moved |= self.joining.start_zeros()
        for operation in list(self.operations):
            moved |= self._advance(operation)
            if self.error is not None:
                return True
        if self.joining.last is not None:
            self.joining.end_if_over()
        timeline = self.telemetry.timeline
        if moved and timeline is not None:
            timeline.mark_cycle()
        now = monotonic()
        if now >= self.watch.next_look:
            self.mailbox.look_for_detours(lost, now)
            self.watch.look(now)
        return moved

    def _advance(self, operation: Operation) -> bool:
        try:
            moved = operation.advance()
        except PeerLostError as error:
            rank = self._gone(operation) if error.rank is None else error.rank
            is_unclear = rank is None and monotonic() - operation.broken_at < NAMELESS_SECONDS
            if is_unclear or (rank is not None and self.negotiation.may_have_left(rank)):
                return False  # the operation says it again
            reason = self.mailbox.departed.get(-1 if rank is None else rank)
            who = "" if rank is None else self.topology.describe(rank)
            how = f"{who} has left the job: {reason}" if reason else str(error)
            if who not in how:
                how = f"{who} is lost: {how}"
            raise PeerLostError(f"{operation.what} failed on {self.mailbox.me()}: {how}", rank) from error
        except PayloadError as error:
            raise PayloadError(
                error.rank, error.problem, f"{operation.what} failed on {self.mailbox.me()}: "
            ) from error
        except Exception as error:
            raise HorovodInternalError(f"{operation.what} failed on {self.mailbox.me()}: {in_words(error)}") from error
        if moved and operation in self.operations:
            self.operations.remove(operation)
        return moved is not None

    def _gone(self, operation: Operation) -> int | None:
        """Return the first rank of an operation that has left or is lost, for a library that does not tell which."""
        gone = {*self.mailbox.departed, *self.transport.lost_peers()}.intersection(operation.members)
        left_at = self.mailbox.departed_at
        return min(gone, key=lambda rank: left_at.get(rank, 0.0), default=None)

    def fail(self, error: HorovodInternalError) -> None:
        """End every wait with ``error``: a rank is lost, or this one cannot go on."""
        if self.error is None:
            self.error = error
            self.mailbox.failed, self.driver.looks_at_once = True, False
        for operation in self.operations:
            operation.fail(error)
        self.operations.clear()
        self.lanes.fail(error)
        self.submissions.fail(error)
        self.joining.fail(error)

    # -- inside -------------------------------------------------------------------------------------------------------

    def check_usable(self) -> None:
        """Raise HorovodInternalError where this engine cannot communicate any more.

        PeerLostError and PeerFailedError keep their class: they may have come in between two operations.
        """
        if self.error is None:
            return
        text = (
            f"hvdkit cannot communicate any more: {self.error}\n"
            "HINT: call hvd.shutdown() and hvd.init() on all ranks that are left, or restart the job."
        )
        if isinstance(self.error, PeerLostError | PeerFailedError):
            raise type(self.error)(text, self.error.rank) from self.error
        raise HorovodInternalError(text) from self.error

    def allreduce(
        self,
        arrays: Sequence[Array | DeviceArray],
        request: ReduceRequest,
        call: Call,
        sources: Sequence[Array] | None = None,
    ) -> Handle:
        repetitions = self.groups.repetitions.get(call.process_set_id)
        if repetitions and len(arrays) == 1 and self.error is None:
            if call.name is None:
                call = call._replace(number=self.submissions.count("allreduce", call.process_set_id))
            source = None if sources is None else sources[0]
            if call.name is not None and call.name in repetitions.under_way:
                raise duplicate_name("allreduce", "allreduce", call.name)
            # Of what is in flight already the name may be the same, which is an error.
            asks = call.wake or bool(self.submissions) or self.telemetry.timeline is not None
            self.watch.threads.add(get_ident())
            began = perf_counter()
            done = repetitions.reduce(arrays[0], source, request, call, asks)
            self.telemetry.statistics.waited(perf_counter() - began)
            if done:
                if self._going_on is not None:
                    self._going_on()
                handle = Handle("an allreduce", call.name, self._drive)
                handle.finish(arrays)
                return handle
        return super().allreduce(arrays, request, call, sources)

    def submit(
        self,
        kind: str,
        arrays: Sequence[Array | DeviceArray],
        fields: Signature,
        call: Call,
        detail: Any = None,
        sources: Sequence[Array] | None = None,
        codec: Codec = CASTS["none"],
    ) -> Handle:
        if self.error is not None:
            self.check_usable()
        if self._going_on is not None:
            self._going_on()
        members = self.groups.ranks.get(call.process_set_id)
        if members is None or self.topology.rank not in members:
            there = "does not exist" if members is None else f"has the ranks {members}"
            raise ValueError(
                f"{kind}: rank {self.topology.rank} is not in process set {call.process_set_id}, which {there}.\n"
                "HINT: call it only where process_set.included() is true."
            )
        key = self.submissions.key_for(kind, call)
        signature = {"kind": kind, "ps": call.process_set_id, **fields}
        handle = Handle(key, call.name, self._drive)
        at = None if sources is None else list(sources)
        submission = Submission(key, signature, list(arrays), detail, handle, at, codec)
        self.submissions.enter(submission)
        if arrays and isinstance(arrays[0], DeviceArray):
            self.groups.device = arrays[0].device
        self.watch.threads.add(get_ident())
        if self.telemetry.timeline is not None:
            self.telemetry.begin(key, f"NEGOTIATE_{kind.upper()}")
        self.driver.inbox.append(partial(self.negotiation.announce, submission))
        if call.wake or self.topology.size == 1:
            self.driver.wake()
        return handle

    def _lost(self, sender: int, message: Lost) -> None:
        self.fail((PeerFailedError if message.lives else PeerLostError)(message.text, message.rank))
