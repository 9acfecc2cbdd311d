"""Control messages of this rank: sending them, and acting on those that come in; and the ranks that have left."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from time import monotonic
from typing import Any

from hvdkit.engine.loop.driver import Driver
from hvdkit.engine.loop.messages import Bye, Message, Pong, decode, encode
from hvdkit.engine.loop.relay import Relay
from hvdkit.engine.ranks.topology import Topology
from hvdkit.engine.telemetry.liveness import Liveness
from hvdkit.errors import HorovodInternalError
from hvdkit.transports.base import Transport

# A rank that has said goodbye waits longer than this for the others' goodbyes, and passes messages on meanwhile.
PASSING_ON_SECONDS, SETTLING_SECONDS = 1.0, 0.5
FAILED_SETTLING_SECONDS = 0.05


class Mailbox:
    """Sends control messages and hands each one that comes in to its handler.

    ``handlers``: by the class of a message, called with the sender and the message. ``leftover``: messages that came in
    during init.
    """

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
        self.handlers: dict[type[Message], Callable[[int, Any], None]] = {}
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

    def take(self, sender: int, message: Message) -> None:
        """Act on a message. Raises ValueError for one that is not for this rank."""
        handler = self.handlers.get(type(message))
        if handler is None:
            raise ValueError(f"{type(message).__name__} is for the coordinator")
        handler(sender, message)

    def take_all(self, arrived: Iterable[tuple[int, bytes]]) -> None:
        """Act on the messages that came in, as (sender, bytes)."""
        for rank, payload in arrived:
            self.liveness.heard(rank, monotonic())
            try:
                self.take(rank, decode(payload))
            except (ValueError, TypeError, KeyError, IndexError) as error:
                # To ignore it would leave a rank waiting for the answer.
                raise HorovodInternalError(
                    f"{self.topology.describe(rank)} sent a control message that {self.me()} does not understand: "
                    f"{error!r} in {payload[:200]!r}"
                ) from error

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
