"""This rank's side of the negotiation: announces requests in few bytes, and delivers the coordinator's decisions.

On rank 0 it also holds the coordinator, which gets the messages of its own rank directly.
"""

from __future__ import annotations

import marshal
from collections.abc import Mapping, Sequence
from time import monotonic

from hvdkit.engine.loop.coordinator import Coordinator
from hvdkit.engine.loop.driver import Driver
from hvdkit.engine.loop.mailbox import Mailbox
from hvdkit.engine.loop.messages import Ask, Bye, Join, LaneClosed, Left, Message, NewSignature, Ping, Pong, Waits
from hvdkit.engine.ops import KINDS
from hvdkit.engine.ops.batch import Submission
from hvdkit.engine.telemetry.telemetry import Telemetry
from hvdkit.errors import HorovodInternalError, PeerLostError
from hvdkit.transports.base import Transport

GOODBYE_ON_ITS_WAY_SECONDS = 0.5


class Negotiation:
    """The exchange of requests and decisions with the coordinator on rank 0.

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
        self._transport = transport
        self._rank = transport.rank
        self._cache_capacity = cache_capacity
        self._cached: dict[bytes, int] = {}
        self._broke_at: dict[int, float] = {}
        self.coordinator: Coordinator | None = None
        mailbox.handlers.update(
            {Bye: self._bye, Left: self._left, Ping: self._ping, Pong: lambda sender, message: None}
        )
        if self._rank == 0:
            self.coordinator = Coordinator(transport.size, fusion_threshold, telemetry, static_process_sets)
            mailbox.handlers.update(dict.fromkeys((Ask, NewSignature, LaneClosed, Join, Waits), self._coordinate))

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

    def exchange(self) -> bool:
        """Take the messages that came in, and deliver the coordinator's decisions. True if there were any."""
        mailbox, coordinator = self.mailbox, self.coordinator
        try:
            arrived = mailbox.poll()
        except ValueError as error:
            raise HorovodInternalError(f"{mailbox.me()} does not understand a control message: {error}") from error
        if arrived:
            mailbox.take_all(arrived)
        if coordinator is None or not (coordinator.ready or coordinator.outgoing):
            return bool(arrived)
        own: list[Message] = []
        for ranks, message in coordinator.take_outgoing():
            if self._rank in ranks:
                own.append(message)  # acted on once the others have theirs
            mailbox.tell(ranks, message)
        for message in own:
            mailbox.take(self._rank, message)
        return True

    def look_for_broken(self, lost: Mapping[int, str]) -> None:
        """Raise PeerLostError if a rank of ``lost``, whose connections broke, did not say goodbye."""
        mailbox = self.mailbox
        if lost.keys() - mailbox.departed.keys():
            self._transport.advance()
            self.exchange()  # a goodbye comes before the connection ends, but maybe after the last exchange
        for rank, how in lost.items():
            if rank not in mailbox.departed and mailbox.error is None and not self.may_have_left(rank):
                raise PeerLostError(
                    f"{mailbox.topology.describe(rank)} is lost: its connection to {mailbox.me()} broke, {how}\n"
                    "HINT: see what that rank printed last, and whether it was killed.",
                    rank,
                )

    def may_have_left(self, rank: int) -> bool:
        """True if the goodbye of a rank whose connection broke may still be on its way over other ranks."""
        if rank in self.mailbox.departed or self.mailbox.is_neighbour(rank):
            return False
        return monotonic() - self._broke_at.setdefault(rank, monotonic()) < GOODBYE_ON_ITS_WAY_SECONDS

    def _coordinate(self, sender: int, message: Message) -> None:
        assert self.coordinator is not None
        self.coordinator.receive(sender, message, monotonic())

    def _bye(self, sender: int, message: Bye) -> None:
        failed_first = not self.mailbox.failed_with
        self.mailbox.departs(sender, message.reason, message.code)
        if self.coordinator is not None:
            if failed_first and self.mailbox.failed_with:  # before the errors that follow from it
                self.mailbox.tell_everyone(Left(sender, message.reason, message.code))
            self.coordinator.depart(sender, message.reason)

    def _left(self, sender: int, message: Left) -> None:
        self.mailbox.departs(message.rank, message.reason, message.code)

    def _ping(self, sender: int, message: Ping) -> None:
        self.mailbox.tell([sender], Pong())
