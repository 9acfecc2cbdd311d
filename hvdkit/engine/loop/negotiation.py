"""Control messages of this rank, the ranks that have left, and the way to the coordinator."""

from __future__ import annotations

import marshal
from collections.abc import Collection, Iterable
from time import monotonic

from hvdkit.engine.loop.coordinator import Coordinator
from hvdkit.engine.loop.driver import Driver
from hvdkit.engine.loop.messages import Ask, Bye, Message, NewSignature, Pong, encode
from hvdkit.engine.loop.relay import Relay
from hvdkit.engine.ops import KINDS
from hvdkit.engine.ops.batch import Submission
from hvdkit.engine.ranks.topology import Topology
from hvdkit.engine.telemetry.liveness import Liveness
from hvdkit.errors import HorovodInternalError
from hvdkit.transports.base import Transport

# A rank that has said goodbye passes messages on for this time, and waits longer for the others' goodbyes.
PASSING_ON_SECONDS = 1.0
# After a change of routes, messages wait this long for earlier messages on the old route; less after a failure.
SETTLING_SECONDS, FAILED_SETTLING_SECONDS = 0.5, 0.05
DEPARTED_SECONDS = 1.0  # for which messages that a rank sent before it left may be on their way


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
        self.topology, self.liveness, self._driver = topology, liveness, driver
        self.departed: dict[int, str] = {}  # the ranks that said goodbye, and why they left
        self.departed_at: dict[int, float] = {}
        self.error: HorovodInternalError | None = None  # the reason why this rank cannot communicate any more
        self.failed_with = 0  # the exit code of the rank that failed first, as far as any rank has sent one
        self.relay = Relay(transport, topology.nodes, leftover)
        self.poll = self.relay.poll if leftover or len(topology.nodes) > 1 else transport.poll_control
        self._rank = topology.rank

    def tell(self, ranks: Iterable[int], message: Message) -> None:
        """Send a message to the other ranks among ``ranks``; to ranks that have left, only goodbyes and answers."""
        departed = () if isinstance(message, (Bye, Pong)) else self.departed
        receivers = []
        for rank in ranks:  # a loop, since each small operation passes here
            if rank != self._rank and rank not in departed:
                receivers.append(rank)
        if receivers:
            self.relay.send(receivers, encode(message))

    def tell_everyone(self, message: Message) -> None:
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

    def on_the_way_to(self, ranks: Iterable[int]) -> set[int]:
        """Return the ranks that pass on messages for ``ranks``."""
        return {relay for rank in ranks for relay in self.relay.routes.on_the_way_to(rank)}

    def me(self) -> str:
        """Return this rank with its host, for messages."""
        return self.topology.describe(self._rank)


class Negotiation:
    """The path of requests to the coordinator. ``coordinator`` is None on all ranks but rank 0.

    ``cache_capacity``: how many signatures this rank sends once and then refers to by number.
    """

    def __init__(self, driver: Driver, mailbox: Mailbox, cache_capacity: int, coordinator: Coordinator | None) -> None:
        self._driver, self.mailbox, self.coordinator = driver, mailbox, coordinator
        self._cache_capacity = cache_capacity
        self._cached: dict[bytes, int] = {}

    def announce(self, submission: Submission) -> None:
        """Ask the coordinator to run a submission."""
        signature, name, detail = submission.signature, submission.key.name, submission.detail
        if self.coordinator is not None:
            self.coordinator.receive(0, Ask(signature, name, detail), monotonic())
            return
        number = None
        # A signature that is used once would only push out those that come again.
        if KINDS[signature["kind"]].comes_again:
            # A key that stays in this process. Version 2 of marshal gives equal bytes for equal values.
            content = marshal.dumps(signature, 2)
            number = self._cached.get(content)
            if number is None and len(self._cached) < self._cache_capacity:
                number = self._cached[content] = len(self._cached)
                self.mailbox.tell([0], NewSignature(number, signature))
        self.mailbox.tell([0], Ask(signature if number is None else number, name, detail))

    def send_to_coordinator(self, message: Message) -> None:
        if self.coordinator is not None:
            self.coordinator.receive(0, message, monotonic())
        else:
            self.mailbox.tell([0], message)

    def send_later(self, message: Message) -> None:
        """Have the driver send a message to the coordinator."""
        self._driver.defer(lambda: self.send_to_coordinator(message))
