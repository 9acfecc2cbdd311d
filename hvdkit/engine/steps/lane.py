"""The planned channel: a plan's buckets run in the order all ranks agreed on, with no word exchanged about it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from time import monotonic, perf_counter
from typing import Any

from hvdkit.collectives.group import Group, Steps
from hvdkit.collectives.hierarchical import sent_share
from hvdkit.engine.loop.messages import Abandoned, Ended, LaneFailed
from hvdkit.engine.loop.operation import Operation
from hvdkit.engine.loop.tags import SPAN, lane_tag
from hvdkit.engine.steps.abandoned import ABANDONED, ENDED, AbandonedSteps
from hvdkit.engine.steps.arrangement import Observation, arrange, load
from hvdkit.engine.steps.lane_records import LaneRecords
from hvdkit.engine.steps.lanes import Lanes
from hvdkit.engine.steps.plan import Plan
from hvdkit.engine.steps.reducer import Reducer
from hvdkit.engine.telemetry.verifying import LaneVerification
from hvdkit.errors import HorovodInternalError, MismatchError


class Lane:
    """The buckets of one plan on this rank.

    A training thread hands gradients over with ``ready``; the engine's driver starts the pieces of a bucket when all of
    its slots are ready and all pieces before them in the agreed order were started. The first step ends with one small
    exchange in which all ranks learn when rank 0 saw its gradients become ready, and whether its next forward pass
    waits for all, and with that the order of all later steps. Where gradients lie is for ``reducer`` to know.
    """

    def __init__(
        self, lanes: Lanes, lane_id: int, number: int, plan: Plan, group: Group, reducer: Reducer, verify: int
    ) -> None:
        self.lane_id, self.name = lane_id, plan.name
        self._number = number  # in tags
        self.plan, self.slots = plan, plan.slots
        self.group = group
        self.error: HorovodInternalError | None = None
        self.sequence = 0  # operations started since registration, the same on all ranks that are as far
        self.closed = False
        self.moved_at = 0.0  # when an operation was last through, by monotonic()
        self.joined_until = 0  # up to which sequence number this rank takes part with zeros
        self.reducer = reducer
        # Whether nothing is reduced before the step is finished; gradients may as well be handed over then.
        self.takes_turns = reducer.takes_turns
        self._running: dict[int, Operation] = {}  # by sequence
        self.lanes, self._mailbox, self._driver = lanes, lanes.mailbox, lanes.driver
        self._sizes = reducer.sizes(lanes.sizes)
        self.records = LaneRecords(lanes.telemetry, plan, reducer, self._sizes.reason)
        self.verification = LaneVerification(group, verify)
        self._abandoned = AbandonedSteps()
        self._ended: tuple[int, int] | None = None  # the rank that ended a step, and the step
        self._lock = threading.Lock()
        self._finishing = False
        self.steps = 0  # that are over, which ranks count alike: also what was given up or taken part in with zeros
        self._started = 0  # operations of this step
        self._completed = 0
        self._observation = Observation(group, len(plan.slots), plan.overlaps_forward)
        self._arrange()

    # -- the training thread ------------------------------------------------------------------------------------------

    @property
    def on_device(self) -> bool:
        """Whether slots are tensors of a device, not numpy arrays."""
        return self.reducer.on_device

    def small(self, slot: int) -> Any:
        """The flat memory into which the gradient of a small slot is copied; None for a large one."""
        return self.reducer.small(slot)

    def ready(self, slot: int, offer: Any, since: float | None = None) -> None:
        """This rank's gradient of a slot is complete; it is the engine's until ``finish``, and holds the result then.

        ``offer``: an Offer, of flat memory; FILLED for a small slot, whose gradient was copied to ``small``; None: this
        rank has no gradient, and contributes zeros. ``since`` (perf_counter): when it was complete, if not just now;
        UNSEEN where nobody saw that.
        """
        self.reducer.offer(slot, offer)
        mark = self.reducer.mark()
        with self._lock:
            if slot in self._ready:
                raise AssertionError(f"slot {self.slots[slot].name!r} was handed over twice in one step")
            self._ready.add(slot)
            if self.steps == 0:
                self._observation.sees(slot, since)
            bucket = self.arrangement.bucket_of[slot]
            if mark is not None:
                self._marks[bucket].append(mark)
            self._left[bucket] -= 1
            complete = self._left[bucket] == 0
            if complete:
                self.records.waits(bucket)  # before the driver may start it
        if complete and not self.takes_turns:
            self._driver.wake()

    def is_ready(self, slot: int) -> bool:
        """True if a slot was handed over in this step."""
        return slot in self._ready

    def unready_slots(self) -> list[int]:
        """The slots not handed over in this step."""
        with self._lock:
            return [slot for slot in range(len(self.slots)) if slot not in self._ready]

    def begin(self) -> None:
        """A gradient of this step is complete, and will be handed over: until the step is over, it is in flight."""
        self._begun = True

    @property
    def in_flight(self) -> bool:
        """Whether some slot was handed over in this step, or will be."""
        return self._begun or bool(self._ready)

    def finish(self) -> None:
        """Wait until every bucket is reduced. Every slot must be ready.

        Raises HorovodInternalError where a rank is lost, does something else or has given the step up.
        """
        step = self.steps
        self.begin_finish(wakes=False)
        self._end()
        self._use(step)

    def begin_finish(self, wakes: bool = True) -> None:
        """Every slot is ready: all are reduced in the background. ``wait`` waits for some, ``finish`` for all."""
        assert not self.unready_slots(), "finish() before every slot was ready"
        if self.verifies and not self._finishing:
            self.verification.prepare()
        self._finishing = True
        if wakes:
            self._driver.wake()

    def wait(self, slots: Sequence[int]) -> None:
        """After ``begin_finish``: wait until these slots are reduced. Raises as ``finish`` does, which follows."""
        step, buckets = self.steps, {self.arrangement.bucket_of[slot] for slot in slots}

        def are_reduced() -> bool:  # a signal's handler may end the step meanwhile
            return self.error is not None or self.steps > step or not any(self._unreduced[one] for one in buckets)

        self._drive(are_reduced)
        if self.error is not None:
            raise self.error
        self._use(step)

    def _use(self, step: int) -> None:
        if (rank := self._abandoned.use(step)) is not None:
            self._fail_everywhere(rank)
            raise self.error or AssertionError("a lane that failed has no error")

    def _end(self) -> None:
        self._drive(self.idle)
        if self.error is not None:
            raise self.error
        with self._lock:
            self._end_step()

    def _drive(self, finished: Callable[[], bool]) -> None:
        started = perf_counter()
        self.lanes.drive(self, finished)
        self.records.awaited(started)

    def abandon(self) -> None:
        """Drop the step: what was handed over is waited out with zeros for the rest, and its results are not used.

        Where another rank does use them, the lane fails on all ranks.
        """
        if self.in_flight and self.error is None:
            self._abandoned.here(self.steps)
            self._mailbox.tell_later(self.group.members, Abandoned(self.lane_id, self.steps))
            for slot in self.unready_slots():
                self.ready(slot, None)
            self._finishing = True
            self._end()

    def give_up(self) -> None:
        """Drop the step and wait for nobody; no round of the engine runs meanwhile.

        The lane fails on all ranks, in this step, or in the next one where a rank had all that it needed for this one.
        """
        if self.in_flight and self.error is None:
            self.fail(MismatchError(ENDED % (self._mailbox.me(), self.name)))
            self._mailbox.tell_later(self.group.members, Ended(self.lane_id, self.steps))

    def close(self) -> None:
        """Forget the plan and its memory; the layout stays, for zeros if this rank joins while others go on."""
        self.closed = True
        self.lanes.keep_closed(self)
        if self.error is not None or not self._in_flight:
            self.reducer.end_step()
        self.reducer.forget(quiet=self.is_left)
        self.lanes.give_number_back_later(self)

    # -- the engine's driver ------------------------------------------------------------------------------------------

    @property
    def is_left(self) -> bool:
        """Whether the lane was closed and nothing of it is open here."""
        return self.closed and self.error is None and not self._in_flight

    def idle(self) -> bool:
        """Whether nothing of this lane is on the wire and the step is over or has not begun."""
        return self.error is not None or self._completed == self._planned()

    def startable(self) -> bool:
        """Whether the next operation in the agreed order may start now."""
        with self._lock:  # the training thread may be laying the buckets out anew
            if self.error is not None or not self._room() or (self.takes_turns and not self._finishing):
                return False
            if self._started < len(self.arrangement.pieces):
                return self._left[self.arrangement.pieces[self._started].bucket] == 0
            return self._finishing and self._may_observe()

    def _may_observe(self) -> bool:
        """Exchanges of what was observed or measured come after all pieces, one after the other."""
        return len(self.arrangement.pieces) <= self._started == self._completed < self._planned()

    def _room(self) -> bool:
        """Whether what is on its way leaves room for the next operation."""
        if not self._in_flight:
            return True
        nbytes = self._loads[self._started] if self._started < len(self._loads) else 0
        near = self.sequence - min(self._in_flight) < SPAN
        return near and sum(self._in_flight.values()) + nbytes <= self._sizes.in_flight

    @property
    def caught_up(self) -> bool:
        """Whether this rank, which has joined, has started with zeros what others have, as far as that is possible."""
        return self.error is not None or self.sequence >= self.joined_until

    def zeros_startable(self) -> bool:
        """Whether this rank has joined, others have started the next operation, and it may start here."""
        if self.error is not None or self.sequence >= self.joined_until or not self._room():
            return False
        return self._started < len(self.arrangement.pieces) or self._may_observe()

    def start(self, joined: bool = False) -> Operation:
        """Start the next operation of this step; with zeros, as a rank that has joined does.

        All ranks start the operations of a lane in the same order, so they number them alike.
        """
        index, sequence = self._started, self.sequence
        self._started, self.sequence = index + 1, sequence + 1
        tag = lane_tag(self._number, sequence)
        if index < len(self.arrangement.pieces):
            self._in_flight[sequence] = self._loads[index]
            marks = [self.reducer.mark()] if joined else self._marks[self.arrangement.pieces[index].bucket]
            record = self.records.begin(index)
            steps = record.recorded(self.reducer.reduce(self.arrangement.pieces[index], joined, marks, tag, record.met))
            what = self.records.summary(index)
        else:
            self._in_flight[sequence] = 0
            steps, what = self._exchange(index - len(self.arrangement.pieces), joined, tag)

        def completed(_: Any) -> None:
            del self._in_flight[sequence], self._running[sequence]
            self.moved_at = monotonic()
            if index < len(self.arrangement.pieces):
                self._unreduced[self.arrangement.pieces[index].bucket] -= 1
            self._completed += 1  # from here on the training thread may begin the next step
            if self.closed and not self._in_flight:
                self.reducer.end_step()  # until now others have read and written what was offered
                self.lanes.give_number_back_later(self)
            # The training thread of a joined rank is in join(): nobody else will begin the next step.
            if joined and self._completed == self._planned():
                self._end_step()
                self._driver.wake()

        what += " (joined)" if joined else ""
        operation = Operation(what, steps, self.group.transport, completed, self.group.members)
        self._running[sequence] = operation
        return operation

    def fail(self, error: HorovodInternalError) -> None:
        """End every wait on this lane with ``error``; the lane is of no use afterwards."""
        if self.error is None:
            self.error = error
            self.reducer.rescue()
            # Others may have stopped before these: nobody would ever end them.
            self.lanes.drop_later(self._running.values())
            self.records.failed()

    def abandoned_by(self, rank: int, step: int) -> None:
        """``rank`` does not use the results of ``step``."""
        if self._abandoned.heard(rank, step):
            self._fail_everywhere(rank)

    def ended_by(self, rank: int, step: int) -> None:
        """``rank`` takes no part in ``step``: what it took part in before ends as it must."""
        with self._lock:
            if self._ended is None or step < self._ended[1]:
                self._ended = rank, step
            self._fail_if_ended()

    def waiting_for(self) -> str:
        """What this lane is at, for messages."""
        return self.records.waiting_for(self._completed)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _fail_everywhere(self, rank: int) -> None:
        """``rank`` gave a step up that was used here."""
        text = ABANDONED % (self._mailbox.topology.describe(rank), self.name, self._mailbox.me())
        self.fail(MismatchError(text))
        self._mailbox.tell_later(self.group.members, LaneFailed(self.lane_id, text))

    def _planned(self) -> int:
        return len(self.arrangement.pieces) + self._observes + self.verifies

    def _arrange(self) -> None:
        """Buckets, pieces and their order, from when each slot is ready."""
        plan, share = self.plan, sent_share(self.group.size, self.reducer.layout)
        codecs, network = plan.reduction.codecs, self.lanes.network
        self.arrangement = arrange(
            plan.slots,
            self._observation.ready_at,
            plan.groups,
            self._sizes,
            network,
            share,
            not self.on_device,
            codecs,
            self._observation.overlaps_forward,
        )
        self._loads = [
            load(nbytes, bucket.dtype, codecs[bucket.codec], self._sizes)
            for piece, nbytes in zip(self.arrangement.pieces, self.arrangement.nbytes, strict=True)
            for bucket in [self.arrangement.buckets[piece.bucket]]
        ]
        self.reducer.lay_out(self.arrangement)
        self._begin_step()

    def _end_step(self) -> None:
        """Ready for the next step; after the first one in the order that rank 0 observed."""
        self.reducer.end_step()
        self.steps += 1
        self.records.step_ended(self.steps)
        if self.steps == 1:
            self._arrange()
        else:
            self._begin_step()
        self._fail_if_ended()

    def _fail_if_ended(self) -> None:
        """Nobody may wait for a rank that takes no part in this step."""
        if self._ended is not None and self.steps >= self._ended[1]:
            self.fail(MismatchError(ENDED % (self._mailbox.topology.describe(self._ended[0]), self.name)))

    def _begin_step(self) -> None:
        self._observes = self.steps == 0
        self.verifies = self.verification.due(self.steps + 1)
        self._finishing = False
        self._begun = False
        self._ready: set[int] = set()
        self._left = [len(bucket.slots) for bucket in self.arrangement.buckets]
        self._unreduced = [0] * len(self._left)  # pieces of each bucket
        for piece in self.arrangement.pieces:
            self._unreduced[piece.bucket] += 1
        self._marks: list[list[Any]] = [[] for _ in self.arrangement.buckets]
        self._in_flight: dict[int, int] = {}  # bytes by sequence
        self._started = 0
        self._completed = 0

    def _exchange(self, number: int, joined: bool, tag: int) -> tuple[Steps[None], str]:
        """What ranks tell each other at the end of this step, and what that is called."""
        if number == self._observes:
            return self.verification.exchange(joined, tag), f"whether parameters are the same, of {self.name}"
        return self._observation.exchange(tag, joined), f"the gradient order of {self.name}"
