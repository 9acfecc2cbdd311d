"""Control messages of this rank: to whom it tells what, who does what when one comes in, and who has left."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from time import monotonic
from typing import Any

from hvdkit.engine.loop.messages import Bye, Message, Pong, decode, encode
from hvdkit.engine.loop.relay import Relay
from hvdkit.engine.ranks.topology import Topology
from hvdkit.engine.telemetry.liveness import Liveness
from hvdkit.errors import HorovodInternalError
from hvdkit.transports.base import Transport

Action = Callable[[], None]

# Who says goodbye waits longer than this for the others' (see session/goodbye), and passes on meanwhile.
PASSING_ON_SECONDS, SETTLING_SECONDS = 1.0, 0.5
FAILED_SETTLING_SECONDS = 0.05


class Mailbox:
    """``handlers`` are by the class of a message: whoever acts on it is called with its sender and the message.

    ``defer`` has the driver do something in its next round: no other thread sends. ``early`` are messages that came
    from engines that started sooner.
    """

    def __init__(
        self,
        transport: Transport,
        topology: Topology,
        liveness: Liveness,
        defer: Callable[[Action], None],
        early: list[tuple[int, bytes]],
    ) -> None:
        self.topology = topology
        self.liveness = liveness
        self.defer = defer
        self.handlers: dict[type[Message], Callable[[int, Any], None]] = {}
        self.departed: dict[int, str] = {}  # the ranks that said goodbye, and why they left
        self.departed_at: dict[int, float] = {}
        self.failed = False  # this rank goes on no more: its engine has an error
        self.failed_with = 0  # the exit code of the rank that failed first, as far as any told
        self.relay = Relay(transport, topology.nodes, early)
        # Where nobody passes anything on, nobody need look for that.
        self._poll = self.relay.poll if early or len(topology.nodes) > 1 else transport.poll_control
        self._rank = topology.rank

    def tell(self, ranks: Iterable[int], message: Message) -> None:
        """Tell those of ``ranks`` that are others and have not left; who says goodbye waits for that of all others.

        One that cannot be reached is noticed by whoever looks for lost ones.
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
        """Have the driver tell those of ``ranks`` that are others something."""
        self.defer(lambda: self.tell(ranks, message))

    def take(self, sender: int, message: Message) -> None:
        """Act on a message. Raises ValueError for one that is not for this rank."""
        handler = self.handlers.get(type(message))
        if handler is None:
            raise ValueError(f"{type(message).__name__} is for the coordinator")
        handler(sender, message)

    def receive(self) -> bool:
        """Act on all that has come in. True if there was anything."""
        try:
            arrived = self._poll()
        except ValueError as error:
            raise HorovodInternalError(f"{self.me()} does not understand a control message: {error}") from error
        for rank, payload in arrived:
            self.liveness.heard(rank, monotonic())
            try:
                self.take(rank, decode(payload))
            except (ValueError, TypeError, KeyError, IndexError) as error:
                # To ignore it would leave somebody waiting for the answer.
                raise HorovodInternalError(
                    f"{self.topology.describe(rank)} sent a control message that {self.me()} does not understand: "
                    f"{error!r} in {payload[:200]!r}"
                ) from error
        return bool(arrived)

    def departs(self, rank: int, reason: str, code: int) -> None:
        """A rank has said goodbye, or another one told that it did."""
        self.departed[rank] = str(reason)
        self.failed_with = self.failed_with or code
        self.departed_at.setdefault(rank, monotonic())
        if code:
            self.relay.avoid([rank], FAILED_SETTLING_SECONDS)

    def look_for_detours(self, lost: Collection[int], now: float) -> None:
        """Pass messages on over no rank that is lost or has ended; one that said goodbye does so for a while."""
        if lost:
            self.relay.avoid(lost, 0.0)
        if self.departed_at:
            ended = [rank for rank, at in self.departed_at.items() if now - at > PASSING_ON_SECONDS]
            self.relay.avoid(ended, SETTLING_SECONDS)

    def is_neighbour(self, rank: int) -> bool:
        """Whether this one speaks with ``rank`` itself, so that a goodbye comes before the connection's end."""
        return rank in self.relay.neighbours()

    def on_the_way_to(self, ranks: Iterable[int]) -> set[int]:
        """The ranks that pass on what is for these."""
        return {one for rank in ranks for one in self.relay.routes.on_the_way_to(rank)}

    def me(self) -> str:
        """This rank, for messages."""
        return self.topology.describe(self._rank)
