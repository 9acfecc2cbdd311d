"""This rank's side of the negotiation: announces requests with few bytes, and takes part in what is decided.

On rank 0 it also holds the coordinator, whom its own messages reach without a detour.
"""

from __future__ import annotations

import marshal
from collections.abc import Mapping, Sequence
from time import monotonic

from hvdkit.engine.loop.coordinator import Coordinator
from hvdkit.engine.loop.mailbox import Mailbox
from hvdkit.engine.loop.messages import Ask, Bye, Join, LaneClosed, Left, Message, NewSignature, Ping, Pong, Waits
from hvdkit.engine.ops import KINDS, Submission
from hvdkit.engine.telemetry.telemetry import Telemetry
from hvdkit.errors import PeerLostError
from hvdkit.transports.base import Transport

GOODBYE_ON_ITS_WAY_SECONDS = 0.5


class Negotiation:
    """Tells the coordinator what this rank wants, and the members what the coordinator decided.

    ``cache_capacity``: how many signatures the coordinator may be asked to remember for this rank.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        transport: Transport,
        fusion_threshold: int,
        cache_capacity: int,
        static_process_sets: Sequence[list[int]],
        telemetry: Telemetry,
    ) -> None:
        self.mailbox = mailbox
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
            self.coordinator = Coordinator(transport.size, fusion_threshold, telemetry)
            self.coordinator.add_static_process_sets(static_process_sets)
            mailbox.handlers.update(dict.fromkeys((Ask, NewSignature, LaneClosed, Join, Waits), self._coordinate))

    def announce(self, submission: Submission) -> None:
        """Ask the coordinator to run what was submitted."""
        signature = submission.signature
        name, detail = submission.key.name, submission.detail
        # What is asked for once would only push out signatures that come again.
        if not KINDS[signature["kind"]].comes_again or self._rank == 0:
            self.send_to_coordinator(Ask(signature, name, detail))
            return
        # As a key only: it stays in this process. Version 2 gives equal bytes for equal values.
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

    def later(self, message: Message) -> None:
        """Have the driver tell the coordinator something."""
        self.mailbox.defer(lambda: self.send_to_coordinator(message))

    def exchange(self) -> bool:
        """Take what has come in, deliver what the coordinator decided. True if there was anything."""
        moved = self.mailbox.receive()
        if self.coordinator is not None:
            own: list[Message] = []
            for ranks, message in self.coordinator.take_outgoing():
                moved = True
                if self._rank in ranks:
                    own.append(message)  # first what others wait for; then this rank's own part of it
                self.mailbox.tell(ranks, message)
            for message in own:
                self.mailbox.take(self._rank, message)
        return moved

    def look_for_broken(self, lost: Mapping[int, str]) -> None:
        """Raise PeerLostError where one of ``lost``, whose connections broke, did not say goodbye."""
        mailbox = self.mailbox
        if lost.keys() - mailbox.departed.keys():
            self._transport.advance()
            self.exchange()  # a goodbye comes before the connection ends, but maybe after we last looked
        for rank, how in lost.items():
            if rank not in mailbox.departed and not mailbox.failed and not self.may_have_left(rank):
                raise PeerLostError(
                    f"{mailbox.topology.describe(rank)} is lost: its connection to {mailbox.me()} broke, {how}\n"
                    "HINT: see what that rank printed last, and whether it was killed.",
                    rank,
                )

    def may_have_left(self, rank: int) -> bool:
        """Whether the goodbye of a rank whose connection broke may still be on its way, over others."""
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
            if failed_first and self.mailbox.failed_with:  # before what ranks are answered because of it
                self.mailbox.tell_everyone(Left(sender, message.reason, message.code))
            self.coordinator.depart(sender, message.reason)

    def _left(self, sender: int, message: Left) -> None:
        self.mailbox.departs(message.rank, message.reason, message.code)

    def _ping(self, sender: int, message: Ping) -> None:
        self.mailbox.tell([sender], Pong())  # who has left meanwhile needs none
