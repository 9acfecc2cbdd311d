"""Rounds of the engine: each acts on messages and advances all that is in flight; a lost rank fails everything."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from time import monotonic
from typing import TYPE_CHECKING

from hvdkit.engine.loop import messages
from hvdkit.engine.loop.batches import Batches
from hvdkit.engine.loop.operation import Operation
from hvdkit.errors import HorovodInternalError, PayloadError, PeerFailedError, PeerLostError, in_words

if TYPE_CHECKING:
    from hvdkit.engine.session.core import Engine

logger = logging.getLogger("hvdkit")

# How long an error that names no rank, as those of a device's library, waits for a goodbye or a broken connection.
NAMELESS_SECONDS = 5.0
GOODBYE_ON_ITS_WAY_SECONDS, ELASTIC_GOODBYE_SECONDS = 0.5, 0.05


class Rounds:
    """The work of the driver, which calls ``run`` from one thread at a time."""

    def __init__(self, engine: Engine, batches: Batches) -> None:
        self._transport = engine.transport
        self._driver = engine.driver
        self._telemetry = engine.telemetry
        self._negotiation = engine.negotiation
        self._mailbox = engine.mailbox
        self._named = engine.named
        self._submissions = engine.submissions
        self._operations = engine.operations
        self._lanes = engine.lanes
        self._ordered, self._messages = engine.ordered, engine.messages
        self._joining = engine.joining
        self._watch = engine.watch
        self._batches = batches
        self._is_elastic = engine.transport.is_elastic
        self._broke_at: dict[int, float] = {}

    def busy(self) -> bool:
        """True if anything waits to be driven, or a timeline is on, which records when messages come in."""
        return bool(
            self._driver.inbox
            or self._operations
            or self._submissions
            or self._joining.waiting
            or self._mailbox.relay.held
            or self._telemetry.timeline is not None
        )

    def run(self) -> bool:
        """Advance everything once. True if anything moved. An error is not raised: it ends every wait."""
        mailbox, joining, operations, inbox = self._mailbox, self._joining, self._operations, self._driver.inbox
        was_broken = mailbox.error is not None
        try:
            moved = bool(inbox)
            while inbox:
                inbox.popleft()()
            moved |= self._transport.advance()
            moved |= self._exchange()
            if mailbox.error is not None:
                self.fail(mailbox.error)  # also submissions that came in while the engine failed
                return moved
            now = monotonic()
            looks = now >= self._watch.next_look
            if (looks or not moved) and (lost := self._transport.lost_peers()):  # a round that moved is not the last
                self._look_for_broken(lost, now)
            for lane in list(self._lanes.values()):
                while lane.startable():
                    operations.append(lane.start())
                    if joining.ranks:
                        joining.tell_started(lane)
                    moved = True
            if joining.followed:
                moved |= joining.start_zeros()
            for operation in list(operations):
                try:
                    progress = operation.advance()
                except Exception as error:
                    self._fail_operation(operation, error)
                    progress = None
                if progress is not None:
                    moved = True
                    if progress and operation in operations:
                        operations.remove(operation)
                if mailbox.error is not None:
                    return True
            if joining.last is not None:
                joining.end_if_over()
            timeline = self._telemetry.timeline
            if moved and timeline is not None:
                timeline.mark_cycle()
            if looks:
                mailbox.look_for_detours((), now)
                self._watch.look(now)
            return moved
        except BaseException as error:
            return self._break(error, was_broken)

    def _exchange(self) -> bool:
        """Act on the messages that came in, and deliver the coordinator's decisions. True if there were any."""
        mailbox, coordinator = self._mailbox, self._negotiation.coordinator
        try:
            arrived = mailbox.poll()
        except ValueError as error:
            raise HorovodInternalError(f"{mailbox.me()} does not understand a control message: {error}") from error
        for sender, payload in arrived:
            mailbox.liveness.heard(sender, monotonic())
            try:
                self._act_on(sender, messages.decode(payload))
            except (ValueError, TypeError, KeyError, IndexError) as error:
                # To ignore it would leave a rank waiting for the answer.
                raise HorovodInternalError(
                    f"{mailbox.topology.describe(sender)} sent a control message that {mailbox.me()} does not "
                    f"understand: {error!r} in {payload[:200]!r}"
                ) from error
        if coordinator is None or not (coordinator.ready or coordinator.outgoing):
            return bool(arrived)
        rank = mailbox.topology.rank
        own: list[messages.Message] = []
        for ranks, message in coordinator.take_outgoing():
            if rank in ranks:
                own.append(message)  # acted on once the others have theirs
            mailbox.tell(ranks, message)
        for message in own:
            self._act_on(rank, message)
        return True

    def _act_on(self, sender: int, message: messages.Message) -> None:
        """Act on a control message. Raises ValueError for a message that is not for this rank."""
        mailbox, coordinator = self._mailbox, self._negotiation.coordinator
        match message:
            case messages.Ask() if coordinator is not None:
                coordinator.receive(sender, message, monotonic())
            case messages.Run():
                self._batches.run(message)
            case messages.Reject():
                self._batches.reject(message)
            case messages.LaneStarted():
                self._joining.follow(message)
            case messages.LaneFailed():
                self._lanes.lane_failed(message)
            case messages.GroupFailed(number, text):
                if (group := self._ordered.get(number)) is not None:
                    group.fail(HorovodInternalError(text))
            case messages.MessageOffer():
                self._messages.offered(sender, message)
            case messages.Abandoned():
                self._lanes.abandoned(sender, message, self._joining.waiting)
            case messages.Joined(rank):
                self._joining.joined(rank)
            case messages.JoinDone(rank):
                self._joining.end(rank)
            case messages.JoinFailed(text):
                self._joining.fail(PeerLostError(text))
            case messages.Ping():
                mailbox.tell([sender], messages.Pong())
            case messages.Pong():
                pass
            case messages.Bye(reason, code):
                failed_first = not mailbox.failed_with
                mailbox.departs(sender, reason, code)
                self._raise_if_failed(sender, reason, code)
                if coordinator is not None:
                    if failed_first and mailbox.failed_with:  # before the errors that follow from it
                        mailbox.tell_everyone(messages.Left(sender, reason, code))
                    coordinator.depart(sender, reason)
            case messages.Left(rank, reason, code):
                mailbox.departs(rank, reason, code)
                self._raise_if_failed(rank, reason, code)
            case messages.Lost(rank, lives, text):
                self.fail((PeerFailedError if lives else PeerLostError)(text, rank))
            case _ if coordinator is not None:
                coordinator.receive(sender, message, monotonic())
            case _:
                raise ValueError(f"{type(message).__name__} is for the coordinator")

    def _raise_if_failed(self, rank: int, reason: str, code: int) -> None:
        """Raise PeerLostError if a rank of an elastic job has left with an exit code: its data may never come."""
        if self._is_elastic and code:
            raise PeerLostError(f"{self._mailbox.topology.describe(rank)} has left the job: {reason}", rank)

    def _look_for_broken(self, lost: Mapping[int, str], now: float) -> None:
        """Look at broken connections. Raises PeerLostError for a rank that did not say goodbye before."""
        mailbox = self._mailbox
        if lost.keys() - mailbox.departed.keys():
            self._transport.advance()
            self._exchange()  # a goodbye comes before the connection ends, but maybe after the last exchange
        for rank, cause in lost.items():
            if rank not in mailbox.departed and mailbox.error is None and not self._may_have_left(rank):
                raise PeerLostError(
                    f"{mailbox.topology.describe(rank)} is lost: its connection to {mailbox.me()} broke, {cause}\n"
                    "HINT: see what that rank printed last, and whether it was killed.",
                    rank,
                )
        mailbox.look_for_detours(lost, now)

    def _may_have_left(self, rank: int) -> bool:
        """True if the goodbye of a rank whose connection broke may still be on its way, over other ranks."""
        if rank in self._mailbox.departed or self._mailbox.relay.is_neighbour(rank):
            return False
        seconds = ELASTIC_GOODBYE_SECONDS if self._is_elastic else GOODBYE_ON_ITS_WAY_SECONDS
        return monotonic() - self._broke_at.setdefault(rank, monotonic()) < seconds

    def _fail_operation(self, operation: Operation, error: Exception) -> None:
        """Raise the error of an operation, naming the lost rank. Return if a goodbye may still explain it."""
        fact = f"{operation.what} failed on {self._mailbox.me()}: "
        if isinstance(error, PeerLostError):
            self._look_for_broken(self._transport.lost_peers(), monotonic())
            if self._mailbox.error is not None:
                return
            rank = error.rank
            if rank is None:  # a library that does not name it: the first of the operation's ranks that left or is lost
                gone = {*self._mailbox.departed, *self._transport.lost_peers()}.intersection(operation.members)
                left_at = self._mailbox.departed_at
                rank = min(gone, key=lambda rank: left_at.get(rank, 0.0), default=None)
            if rank is None:
                may_be_explained = monotonic() - operation.broken_at < NAMELESS_SECONDS
            else:
                may_be_explained = self._may_have_left(rank)
            if may_be_explained:
                return  # the operation raises it again
            reason = self._mailbox.departed.get(-1 if rank is None else rank)
            peer = "" if rank is None else self._mailbox.topology.describe(rank)
            text = f"{peer} has left the job: {reason}" if reason else str(error)
            if peer not in text:
                text = f"{peer} is lost: {text}"
            raise PeerLostError(fact + text, rank) from error
        if isinstance(error, PayloadError):
            raise PayloadError(error.rank, error.problem, fact) from error
        raise HorovodInternalError(fact + in_words(error)) from error

    def _break(self, error: BaseException, was_broken: bool) -> bool:
        """End every wait with ``error``, and tell the other ranks, which would wait for this one."""
        me = self._mailbox.me()
        if isinstance(error, HorovodInternalError):
            failure = error
        elif isinstance(error, Exception):  # a defect of hvdkit, which ends waits on other threads too
            if not was_broken:
                logger.error("the engine failed on %s", me, exc_info=error)
            failure = HorovodInternalError(f"the engine failed on {me}: {in_words(error)}")
            failure.__cause__ = error
        else:  # Ctrl-C in the middle of a sum, of which nobody can know how far it is
            failure = HorovodInternalError(f"{me} was interrupted by {type(error).__name__}")
        if not was_broken:
            lost = set(self._transport.lost_peers())
            message = messages.Lost(self._mailbox.topology.rank, True, str(failure))
            if isinstance(failure, PeerLostError):
                message = messages.Lost(failure.rank, False, str(failure))
                lost.update([] if failure.rank is None else [failure.rank])
            self._mailbox.look_for_detours(lost, monotonic())
            self._mailbox.tell_everyone(message)
        self.fail(failure)
        if not isinstance(error, Exception):
            raise error
        return not was_broken

    def fail(self, error: HorovodInternalError) -> None:
        """End every wait with ``error``: a rank is lost, or this rank cannot go on."""
        if self._mailbox.error is None:
            self._mailbox.error, self._driver.looks_at_once = error, False
        operations = list(self._operations)
        for operation in operations:
            operation.fail(error)
        self._operations.clear()
        for group in list(self._ordered.values()):
            group.fail(error)
        self._messages.fail(error)
        self._lanes.fail(error)
        self._named.fail(error)
        self._joining.fail(error)
        if self._is_elastic:
            for operation in operations:
                operation.close()
