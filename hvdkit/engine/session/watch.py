"""Finds, ten times a second, dead-locks, stalls, and ranks that are lost or have left."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection
from typing import TYPE_CHECKING

from hvdkit.engine.loop.messages import Lost, Ping, Waits
from hvdkit.engine.loop.negotiation import DEPARTED_SECONDS
from hvdkit.engine.ops.batch import Handle
from hvdkit.engine.ops.hints import JOIN_LEFT, LEFT_EARLY, STALLED, for_stall
from hvdkit.engine.steps.lane import Lane
from hvdkit.engine.telemetry.liveness import Loss
from hvdkit.errors import PeerLostError, StallError

if TYPE_CHECKING:
    from hvdkit.engine.loop.waiting import WaitingThread
    from hvdkit.engine.session.core import Engine
    from hvdkit.kernels._native import Heartbeat

logger = logging.getLogger("hvdkit")

LOOK_SECONDS = 0.1
BLOCKED_SECONDS = 0.2  # of a wait before the coordinator hears of it, so that it can find a dead-lock


class Watch:
    """The time limits of the engine. Rounds call ``look`` from ``next_look`` on."""

    def __init__(self, engine: Engine, heartbeat: Heartbeat | None) -> None:
        self._settings = engine.settings
        self._heartbeat = heartbeat
        self._negotiation = engine.negotiation
        self._mailbox = engine.mailbox
        self._waiting = engine.waiting
        self._joining = engine.joining
        self._submissions = engine.submissions
        self._operations = engine.operations
        self._ordered, self._messages = engine.ordered, engine.messages
        self._topology, self._liveness = self._mailbox.topology, self._mailbox.liveness
        self.next_look = 0.0

    def lost_since(self, ranks: Collection[int], since: float, now: float) -> list[Loss]:
        """Return the losses among ``ranks``, if this rank has waited for them since ``since``."""
        self._liveness.looks(now)  # the machine, with all its ranks, may have been paused
        self._count_beats(ranks, now)
        losses = (self._liveness.loss(rank, since, now) for rank in ranks)
        return [loss for loss in losses if loss is not None]

    def loss_text(self, loss: Loss, omission: str = "") -> str:
        """Return how a rank was lost, for messages. ``omission``: what else the rank did not do."""
        lost, me, settings = self._topology.describe(loss.rank), self._mailbox.me(), self._settings
        if loss.beats:
            return (
                f"{lost} is alive, but its Python interpreter gave {me} no answer for "
                f"{settings.longest_unresponsive_seconds:g} s (HVDKIT_UNRESPONSIVE_TIMEOUT_SECONDS){omission}.\n"
                "HINT: see what the rank is doing (py-spy dump): a library keeps Python's lock (GIL), or threads wait "
                "for each other; raise the variable if such a call may take longer."
            )
        return (
            f"{lost} gave {me} no sign of life for {settings.timeout_seconds:g} s "
            f"(HVDKIT_TIMEOUT_SECONDS){omission}.\n"
            "HINT: see whether it was killed, stopped, or cut off from the network."
        )

    def look(self, now: float) -> None:
        """Report, warn and fail as time demands. Raises PeerLostError if a rank that this rank waits for is lost."""
        self.next_look = now + LOOK_SECONDS
        if self._topology.size == 1 or self._mailbox.error is not None:
            return
        self._liveness.looks(now)
        self._report_blocked(now)
        self._look_for_stalls(now)
        self._look_for_departed(now)
        self._look_for_lost(now)
        for group in list(self._ordered.values()):
            group.look(now)
        self._messages.look(now)

    def _report_blocked(self, now: float) -> None:
        # Without the threads of a framework's pool, of which Python knows at most that they ran.
        submitters = self._waiting.submitters
        submitters &= {
            thread.ident
            for thread in threading.enumerate()
            if thread.ident is not None and not isinstance(thread, threading._DummyThread)
        }
        for thread, waiting in list(self._waiting.by_thread.items()):
            if not submitters or not submitters <= {thread, *self._waiting.dependents.get(thread, ())}:
                continue
            if now - max(waiting.since, waiting.reported_at) < BLOCKED_SECONDS:
                continue
            waiting.reported_at = now  # and again after a while, since the ranks that it waits for change
            subject = waiting.subject
            if isinstance(subject, Lane):
                message = Waits(subject.lane_id, sorted(self._awaited_peers()), subject.waiting_for(), subject.name)
            else:
                key = next((k for k, s in self._submissions.items() if s.handle is subject), None)
                if key is None or not isinstance(subject, Handle):
                    continue  # it runs, and waits for data
                message = Waits([key.process_set, key.kind, key.name], [], subject.description, subject.label)
            self._negotiation.send_to_coordinator(message)

    def _awaited_peers(self) -> set[int]:
        peers = {peer for operation in self._operations for peer in operation.awaited_peers()}
        return peers.union(*(lane.abandonment.unanswered() for _, lane in self._waiting_lanes()))

    def _waiting_lanes(self) -> list[tuple[WaitingThread, Lane]]:
        waiting = list(self._waiting.by_thread.values())
        return [(each, each.subject) for each in waiting if isinstance(each.subject, Lane)]

    def _look_for_stalls(self, now: float) -> None:
        settings = self._settings
        warn_after, fail_after = settings.stall_check_seconds, settings.stall_shutdown_seconds
        coordinator = self._negotiation.coordinator
        warns = warn_after > 0 and not settings.stall_check_disable
        if coordinator is not None and warns:
            for stall in coordinator.stalled(now, warn_after, once=True):
                logger.warning(
                    "%s was submitted by ranks %s, but not by ranks %s for %.0f s.\n%s",
                    stall.key, stall.submitted, stall.missing, stall.seconds, for_stall(str(stall.key)),
                )  # fmt: skip
        if coordinator is not None and fail_after > 0:
            for stall in coordinator.stalled(now, fail_after):
                coordinator.give_up(
                    stall.key,
                    f"{stall.key} stalled: ranks {stall.missing} did not submit it within {fail_after:g} s "
                    f"(HOROVOD_STALL_SHUTDOWN_TIME_SECONDS); ranks {stall.submitted} did.\n"
                    f"{for_stall(str(stall.key))}",
                )
        for waiting, lane in self._waiting_lanes():
            if lane.idle():
                continue
            ranks = sorted(self._awaited_peers())
            seconds = now - max(waiting.since, lane.moved_at)
            if warns and not waiting.warned and seconds > warn_after:
                waiting.warned = True
                logger.warning(
                    "%s has waited for ranks %s in %s for %.0f s.\n%s",
                    self._mailbox.me(), ranks, lane.waiting_for(), seconds, STALLED,
                )  # fmt: skip
            if fail_after > 0 and seconds > fail_after:
                fact = f"{lane.waiting_for()} stalled on {self._mailbox.me()}: ranks {ranks} did not send their part"
                limit = f"within {fail_after:g} s (HOROVOD_STALL_SHUTDOWN_TIME_SECONDS)"
                lane.fail(StallError(f"{fact} {limit}.\n{STALLED}"))

    def _look_for_departed(self, now: float) -> None:
        departed, departed_at = self._mailbox.departed, self._mailbox.departed_at
        if not departed:
            return
        me = self._mailbox.me()
        waits = [(each.awaited_peers(), each.since, f"{each.what} on {me} waits for") for each in self._operations]
        for _, lane in self._waiting_lanes():
            text = f"{me} gave up a step of optimizer '{lane.name}', and waits for the answer of"
            waits.append((lane.abandonment.unanswered(), 0.0, text))
        for peers, since, text in waits:
            rank = min(peers.intersection(departed), key=departed_at.__getitem__, default=None)
            if rank is not None and now - max(since, departed_at[rank]) > DEPARTED_SECONDS:
                raise PeerLostError(
                    f"{text} {self._topology.describe(rank)}, which has left the job: {departed[rank]}.\n"
                    f"{LEFT_EARLY.format(rank=rank)}",
                    rank,
                )
        if 0 in departed and self._joining.waiting:
            raise PeerLostError(JOIN_LEFT.format(rank=0, reason=departed[0]), 0)
        if 0 in departed and self._submissions:
            text = next(iter(self._submissions.values())).handle.description
            first, reason = next(iter(departed.items()))  # the others often leave because the first did
            raise PeerLostError(
                f"{text} on {me} cannot go on without rank 0, which has left the job; the first to "
                f"leave was {self._topology.describe(first)}: {reason}.\n"
                "HINT: let all ranks make the same calls and call hvd.shutdown() together.",
                first,
            )

    def _look_for_lost(self, now: float) -> None:
        mailbox, coordinator = self._mailbox, self._negotiation.coordinator
        awaited = self._awaited_peers()
        if self._submissions or self._joining.waiting:
            awaited.add(0)
        if coordinator is not None:
            awaited |= coordinator.awaited_ranks()
        awaited |= mailbox.on_the_way_to(awaited)
        awaited -= {self._topology.rank, *mailbox.departed}
        self._count_beats(awaited, now)
        silent, losses = self._liveness.check(awaited, now)
        mailbox.tell(silent, Ping())
        # Where a rank is not heard, the rank that passes its messages on may be the lost one.
        losses = [loss for loss in losses if self._liveness.heard_lately(mailbox.on_the_way_to([loss.rank]), now)]
        if losses:
            text = self.loss_text(losses[0])
            mailbox.tell_everyone(Lost(losses[0].rank, False, text))
            raise PeerLostError(text, losses[0].rank)

    def _count_beats(self, ranks: Collection[int], now: float) -> None:
        if self._heartbeat is not None:
            for rank in ranks:
                self._liveness.counted(rank, self._heartbeat.count(rank), now)
