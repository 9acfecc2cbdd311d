"""This rank's side of the negotiation: announces requests with few bytes, and acts on what others tell."""

from __future__ import annotations

import logging
import marshal
from collections.abc import Iterable, Sequence
from time import monotonic
from typing import TYPE_CHECKING

from hvdkit.engine.coordinator import Coordinator
from hvdkit.engine.ending import exit_status
from hvdkit.engine.messages import (
    Ask,
    Bye,
    Ended,
    GivenUp,
    JoinDone,
    Joined,
    JoinFailed,
    LaneFailed,
    LaneStarted,
    Left,
    Lost,
    Message,
    NewSignature,
    Ping,
    Pong,
    Reject,
    Run,
    decode,
    encode,
)
from hvdkit.engine.ops import KINDS
from hvdkit.engine.requests import Key
from hvdkit.errors import HorovodInternalError, PeerLostError

if TYPE_CHECKING:
    from hvdkit.engine.core import Engine
    from hvdkit.engine.ops import Submission

logger = logging.getLogger("hvdkit")


class Negotiation:
    """Messages out and in. On rank 0 it also holds the coordinator, whom its own messages reach without a detour."""

    def __init__(self, engine: Engine, static_process_sets: Sequence[list[int]]) -> None:
        self._engine = engine
        self._rank = engine.topology.rank
        self._cached: dict[bytes, int] = {}
        self.departed: dict[int, str] = {}
        self.failed_with = 0  # the exit code of the rank that failed first, as far as any told
        self.coordinator: Coordinator | None = None
        if self._rank == 0:
            self.coordinator = Coordinator(engine.transport.size, engine.sizes.bucket)
            self.coordinator.add_static_process_sets(static_process_sets)

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
            if len(self._cached) >= self._engine.settings.cache_capacity:
                self.send_to_coordinator(Ask(signature, name, detail))
                return
            number = self._cached[content] = len(self._cached)
            self.send_to_coordinator(NewSignature(number, signature))
        self.send_to_coordinator(Ask(number, name, detail))

    def send_to_coordinator(self, message: Message) -> None:
        if self.coordinator is not None:
            self.coordinator.receive(0, message, monotonic())
        else:
            self.send(0, message)

    def send(self, rank: int, message: Message) -> None:
        if rank == self._rank:
            self._take(rank, message)
        elif rank not in self.departed or isinstance(message, (Bye, Pong)):  # who said goodbye waits for ours
            self._engine.transport.send_control(rank, encode(message))

    def tell_everyone(self, message: Message) -> None:
        """Send to all other ranks, as far as they can be reached."""
        self.tell(range(self._engine.transport.size), message)

    def tell(self, ranks: Iterable[int], message: Message) -> None:
        """Send to those of ``ranks`` that are others, as far as they can be reached."""
        for rank in ranks:
            if rank != self._rank:
                try:
                    self.send(rank, message)
                except PeerLostError as error:
                    logger.info("could not tell rank %d: %s", rank, error)

    def exchange(self) -> bool:
        """Take what has come in, deliver what the coordinator decided. True if there was anything."""
        moved = False
        for rank, payload in self._engine.transport.poll_control():
            moved = True
            self._engine.watch.heard(rank)
            try:
                self._take(rank, decode(payload))
            except (ValueError, TypeError, KeyError, IndexError) as error:
                # To ignore it would leave somebody waiting for the answer.
                raise HorovodInternalError(
                    f"{self._engine.topology.told(rank)} sent a control message that {self._engine.told()} does not "
                    f"understand: {error!r} in {payload[:200]!r}"
                ) from error
        if self.coordinator is not None:
            own: list[Message] = []
            for rank, message in self.coordinator.take_outgoing():
                moved = True
                if rank == self._rank:
                    own.append(message)  # first what others wait for; then this rank's own part of it
                else:
                    self.send(rank, message)
            for message in own:
                self._take(self._rank, message)
        return moved

    def look_for_broken(self) -> None:
        """Raise PeerLostError where a connection broke to a rank that did not say goodbye."""
        engine = self._engine
        lost = engine.transport.lost_peers()
        if not lost:
            return
        if lost.keys() - self.departed.keys():
            engine.transport.advance()
            self.exchange()  # a goodbye comes before the connection ends, but maybe after we last looked
        for rank, how in lost.items():
            if rank not in self.departed and engine.error is None:
                raise PeerLostError(
                    f"{engine.topology.told(rank)} is lost: its connection to {engine.told()} broke, {how}\n"
                    "HINT: see what that rank printed last, and whether it was killed.",
                    rank,
                )

    def _take(self, sender: int, message: Message) -> None:
        engine = self._engine
        match message:
            case Run():
                engine.batches.run(message)
            case Reject():
                engine.reject(Key(message.process_set, message.kind, message.name), message.text, message.cause)
            case Joined(rank):
                engine.joining.joined(rank)
            case JoinDone(rank):
                engine.joining.done(rank)
            case JoinFailed(text):
                engine.joining.fail(PeerLostError(text))
            case LaneStarted(lane, sequence):
                engine.joining.follow(lane, sequence)
            case GivenUp(lane, step):
                engine.lane_given_up(sender, lane, step)
            case Ended(lane, step):
                engine.lane_ended(sender, lane, step)
            case LaneFailed(lane, text):
                engine.lane_failed(lane, text)
            case Ping():
                self.tell([sender], Pong())  # who has left meanwhile needs none
            case Pong():
                pass  # to have heard of it was all
            case Bye(reason, code):
                failed_first = not self.failed_with
                self._note_departed(sender, reason, code)
                if self.coordinator is not None:
                    if failed_first and self.failed_with:  # before what ranks are answered because of it
                        self.tell_everyone(Left(sender, reason, code))
                    self.coordinator.depart(sender, reason)
            case Left(rank, reason, code):
                self._note_departed(rank, reason, code)
            case Lost(rank, text):
                engine.fail(PeerLostError(text, rank))
            case _:
                if self.coordinator is None:
                    raise ValueError(f"{type(message).__name__} is for the coordinator")
                self.coordinator.receive(sender, message, monotonic())

    def _note_departed(self, rank: int, reason: str, code: int) -> None:
        self.departed[rank] = str(reason)
        self.failed_with = self.failed_with or exit_status(code)
        self._engine.watch.departed(rank)
