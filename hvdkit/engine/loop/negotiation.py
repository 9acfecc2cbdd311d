"""Control messages of this rank: sending them, the way to the coordinator, and the ranks that have left."""

from __future__ import annotations

import marshal
from collections.abc import Collection, Iterable, Sequence
from time import monotonic

from hvdkit.engine.loop.coordinator import Coordinator
from hvdkit.engine.loop.driver import Driver
from hvdkit.engine.loop.messages import Ask, Bye, Message, NewSignature, Pong, encode
from hvdkit.engine.loop.relay import Relay
from hvdkit.engine.ops import KINDS
from hvdkit.engine.ops.batch import Submission
from hvdkit.engine.ranks.topology import Topology
from hvdkit.engine.telemetry.liveness import Liveness
from hvdkit.engine.telemetry.telemetry import Telemetry
from hvdkit.errors import HorovodInternalError
from hvdkit.transports.base import Transport

# A rank that has said goodbye waits longer than this for the others' goodbyes, and passes messages on meanwhile.
PASSING_ON_SECONDS, SETTLING_SECONDS = 1.0, 0.5
FAILED_SETTLING_SECONDS = 0.05


class Mailbox:
    """The control messages of this rank. ``leftover``: messages that came in during init."""

    def __init__(
        self,
        transport: Transport,
        topology: Topology,
        liveness: Liveness,
        driver: Driver,
        leftover: list[tuple[int, bytes]],
    ) -> None:
        self.topology = topology
        self.liveness = liveness
        self._driver = driver
        self.departed: dict[int, str] = {}  # the ranks that said goodbye, and why they left
        self.departed_at: dict[int, float] = {}
        self.error: HorovodInternalError | None = None  # the reason why this rank cannot communicate any more
        self.failed_with = 0  # the exit code of the rank that failed first, as far as any rank has sent one
        self.relay = Relay(transport, topology.nodes, leftover)
        # Without a relay the transport is asked directly.
        self.poll = self.relay.poll if leftover or len(topology.nodes) > 1 else transport.poll_control
        self._rank = topology.rank

    def tell(self, ranks: Iterable[int], message: Message) -> None:
        """Send to those of ``ranks`` that are others. A rank that has left gets no message but goodbyes and answers.

        An unreachable rank raises no error here: the watch looks for lost ranks.
        """
        departed = () if isinstance(message, (Bye, Pong)) else self.departed
        receivers = []
        for rank in ranks:  # a loop, since each small operation passes here
            if rank != self._rank and rank not in departed:
                receivers.append(rank)
        if receivers:
            self.relay.send(receivers, encode(message))

    def tell_everyone(self, message: Message) -> None:
        """Send to all other ranks."""
        self.tell(range(self.topology.size), message)

    def tell_later(self, ranks: Iterable[int], message: Message) -> None:
        """Have the driver send a message: no other thread sends."""
        self._driver.defer(lambda: self.tell(ranks, message))

    def departs(self, rank: int, reason: str, code: int) -> None:
        """Note that a rank has said goodbye."""
        self.departed[rank] = str(reason)
        self.failed_with = self.failed_with or code
        self.departed_at.setdefault(rank, monotonic())
        if code:
            self.relay.avoid([rank], FAILED_SETTLING_SECONDS)

    def look_for_detours(self, lost: Collection[int], now: float) -> None:
        """Route messages around ranks that are lost, and around ranks that said goodbye a while ago."""
        if lost:
            self.relay.avoid(lost, 0.0)
        if self.departed_at:
            ended = [rank for rank, at in self.departed_at.items() if now - at > PASSING_ON_SECONDS]
            self.relay.avoid(ended, SETTLING_SECONDS)

    def is_neighbour(self, rank: int) -> bool:
        """True if ``rank`` sends to this rank directly, so that its goodbye comes before the end of the connection."""
        return rank in self.relay.neighbours()

    def on_the_way_to(self, ranks: Iterable[int]) -> set[int]:
        """Return the ranks that pass on messages for ``ranks``."""
        return {relay for rank in ranks for relay in self.relay.routes.on_the_way_to(rank)}

    def me(self) -> str:
        """Return this rank with its host, for messages."""
        return self.topology.describe(self._rank)


class Negotiation:
    """The way to the coordinator, and on rank 0 the coordinator itself, which gets its own rank's messages directly.

    ``cache_capacity``: how many signatures the coordinator remembers for this rank.
    """

    def __init__(
        self,
        driver: Driver,
        mailbox: Mailbox,
        transport: Transport,
        fusion_threshold: int,
        cache_capacity: int,
        static_process_sets: Sequence[list[int]],
        telemetry: Telemetry,
    ) -> None:
        self._driver, self.mailbox = driver, mailbox
        self._rank = transport.rank
        self._cache_capacity = cache_capacity
        self._cached: dict[bytes, int] = {}
        self.coordinator: Coordinator | None = None
        if self._rank == 0:
            self.coordinator = Coordinator(transport.size, fusion_threshold, telemetry, static_process_sets)

    def announce(self, submission: Submission) -> None:
        """Ask the coordinator to run a submission."""
        signature = submission.signature
        name, detail = submission.key.name, submission.detail
        # A signature that is used once would only push out those that come again.
        if not KINDS[signature["kind"]].comes_again or self._rank == 0:
            self.send_to_coordinator(Ask(signature, name, detail))
            return
        # A key that stays in this process. Version 2 of marshal gives equal bytes for equal values.
        content = marshal.dumps(signature, 2)
        number = self._cached.get(content)
        if number is None:
            if len(self._cached) >= self._cache_capacity:
                self.send_to_coordinator(Ask(signature, name, detail))
                return
            number = self._cached[content] = len(self._cached)
            self.send_to_coordinator(NewSignature(number, signature))
        self.send_to_coordinator(Ask(number, name, detail))

    def send_to_coordinator(self, message: Message) -> None:
        if self.coordinator is not None:
            self.coordinator.receive(0, message, monotonic())
        else:
            self.mailbox.tell([0], message)

    def send_later(self, message: Message) -> None:
        """Have the driver send a message to the coordinator."""
        self._driver.defer(lambda: self.send_to_coordinator(message))
