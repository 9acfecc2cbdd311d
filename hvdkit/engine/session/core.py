"""The engine of one session, put together of its parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hvdkit.collectives.group import Choice
from hvdkit.compression import CASTS, Codec
from hvdkit.config import Settings
from hvdkit.engine.loop.batches import Batches
from hvdkit.engine.loop.coordinator import Coordinator
from hvdkit.engine.loop.driver import Driver, spin_seconds
from hvdkit.engine.loop.named import NamedOperations
from hvdkit.engine.loop.negotiation import Mailbox, Negotiation
from hvdkit.engine.loop.operation import Operation
from hvdkit.engine.loop.waiting import WaitingThreads
from hvdkit.engine.ops.batch import Handle, Submission
from hvdkit.engine.ops.requests import Key
from hvdkit.engine.ordered.group import OrderedGroup, make_group
from hvdkit.engine.ordered.messages import Messages
from hvdkit.engine.ranks.groups import Groups
from hvdkit.engine.ranks.topology import Topology
from hvdkit.engine.session.joining import Joining
from hvdkit.engine.session.rounds import Rounds
from hvdkit.engine.session.watch import Watch
from hvdkit.engine.steps.lane import Lane
from hvdkit.engine.steps.lanes import Lanes
from hvdkit.engine.steps.plan import Plan, Reduction, Slot
from hvdkit.engine.steps.registration import register
from hvdkit.engine.steps.schedule import Network, choose_sizes
from hvdkit.engine.telemetry.compression_report import CompressionStatistics, compression_statistics
from hvdkit.engine.telemetry.liveness import Liveness
from hvdkit.engine.telemetry.telemetry import CommunicationStatistics, Telemetry
from hvdkit.kernels import ReduceOp
from hvdkit.transports.base import Transport

if TYPE_CHECKING:
    from hvdkit.kernels._native import Heartbeat

PASS_SPIN_SECONDS = 20e-6  # for which a pass over shared memory watches other ranks before other operations get on


class Engine:
    """All collective communication of this rank in its job."""

    def __init__(
        self,
        transport: Transport,
        topology: Topology,
        settings: Settings,
        network: Network,
        static_process_sets: Sequence[list[int]],
        leftover: list[tuple[int, bytes]],
        heartbeat: Heartbeat | None = None,
    ) -> None:
        """``leftover``: control messages that came in during init."""
        self.transport, self.topology, self.settings = transport, topology, settings
        self.operations: list[Operation] = []
        self.submissions: dict[Key, Submission] = {}
        self.telemetry = telemetry = Telemetry(topology.rank)
        spin = spin_seconds(settings.spin_microseconds * 1e-6, transport, topology)
        self.driver = driver = Driver(transport, spin, settings, telemetry.statistics)
        choice = Choice(settings.allreduce, network.latency_seconds, network.seconds_per_byte)
        self.groups = Groups(transport, static_process_sets, choice, min(spin, PASS_SPIN_SECONDS))
        limits = settings.fusion_threshold, settings.max_bytes_in_flight
        sizes = choose_sizes(network, *limits, transport.worthwhile_bytes)
        liveness = Liveness(settings.timeout_seconds, settings.longest_unresponsive_seconds)
        self.mailbox = Mailbox(transport, topology, liveness, driver, leftover)
        coordinator = None
        if transport.rank == 0:
            coordinator = Coordinator(transport.size, sizes.bucket, telemetry, static_process_sets)
        self.negotiation = negotiation = Negotiation(driver, self.mailbox, settings.cache_capacity, coordinator)
        self.waiting = WaitingThreads(driver, negotiation)
        self.named = NamedOperations(self.groups, self.submissions, driver, negotiation, self.waiting, telemetry)
        self.lanes = Lanes(driver, negotiation, telemetry, self.operations, network, sizes, self.waiting)
        self.ordered: dict[int, OrderedGroup] = {}  # by number
        self.messages = Messages(self)
        self.joining = Joining(self)
        self.watch = Watch(self, heartbeat)
        batches = Batches(self.mailbox, self.groups, self.submissions, self.operations, telemetry)
        self.rounds = Rounds(self, batches)
        if transport.size > 1:
            transport.set_waker(driver.wake)
        driver.start(self.rounds)

    def join(self, device: str | None = None) -> Handle:
        """Contribute zeros, on ``device`` if none was used yet, until all have joined; the result is the last rank."""
        self.named.check_usable()
        self.groups.device = self.groups.device or device
        handle = Handle("join()", None, self.waiting)
        self.joining.join(handle)
        return handle

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
    ) -> Lane | None:
        """Agree with all ranks of a process set on tensors that will be reduced together, step after step. Blocks.

        Returns None while a rank has joined: gradients go by name until all have. ``codecs``: the codecs that slots
        number. ``device``: where ("cuda:0") slots shall live if the transport has collectives for it.
        Raises HorovodInternalError on every rank, naming the parameter, if the ranks differ.
        """
        reduction = Reduction(op, float(prescale), float(postscale), tuple(codecs))
        plan = Plan(name, list(slots), reduction, process_set_id, groups, device)
        lane = register(self.named, self.topology, self.settings, self.lanes, plan)
        if lane is not None:
            self.lanes.open(lane)
        return lane

    def ordered_group(self, members: Sequence[int], number: int, name: str, seconds: float) -> OrderedGroup:
        """Return a new group, which only its ``members`` make; it does not communicate.

        ``number``: one that no other group of this job has had, the same on its members, from 1. ``seconds``: the
        longest time of an operation.
        """
        made = self.ordered[number] = make_group(self, members, number, name, seconds)
        return made

    def communication_statistics(self) -> CommunicationStatistics:
        """Return the cost of communication on this rank since init."""
        return self.telemetry.statistics.totals(self.groups.bytes_sent())

    def compression_statistics(self) -> CompressionStatistics:
        """Return the bytes and times of compression on this rank since init."""
        reports = ((lane.name, lane.reducer.reports()) for lane in list(self.lanes.values()))
        return compression_statistics(reports, self.telemetry.statistics.encoded_by_name())
