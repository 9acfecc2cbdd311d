"""The planned channel: a plan's buckets run in the order that all ranks agreed on, without further negotiation."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from time import monotonic, perf_counter
from typing import Any

from hvdkit.collectives.group import Group
from hvdkit.collectives.hierarchical import sent_share
from hvdkit.engine.loop.operation import Operation
from hvdkit.engine.ranks.assignments import lane_tag
from hvdkit.engine.steps.abandonment import Abandonment
from hvdkit.engine.steps.lane_records import LaneRecords
from hvdkit.engine.steps.lane_step import LaneStep
from hvdkit.engine.steps.lanes import Lanes
from hvdkit.engine.steps.plan import Arrangement, Observation, Plan, arrange
from hvdkit.engine.steps.reducer import Reducer
from hvdkit.engine.telemetry.verifying import LaneVerification
from hvdkit.errors import HorovodInternalError


class Lane:
    """The buckets of one plan on this rank.

    A training thread hands gradients over with ``ready``. The engine's driver starts the pieces of a bucket when all of
    its slots are ready and all pieces before them in the agreed order were started. The first step ends with a small
    exchange, in which all ranks learn when rank 0 saw its gradients become ready: the order of all later steps.
    """

    def __init__(
        self, lanes: Lanes, lane_id: int, number: int, plan: Plan, group: Group, reducer: Reducer, verify: int
    ) -> None:
        self.lane_id, self.name = lane_id, plan.name
        self._number = number  # in tags
        self.plan, self.slots, self.group, self.reducer = plan, plan.slots, group, reducer
        self.on_device = reducer.on_device  # slots are tensors of a device, not numpy arrays
        # Nothing is reduced before the step is finished; gradients may as well be handed over then.
        self.takes_turns = reducer.takes_turns
        self.lanes, self._mailbox, self._driver = lanes, lanes.mailbox, lanes.driver
        self.error: HorovodInternalError | None = None
        self.closed = False
        self.sequence = 0  # operations started since registration, the same on all ranks that are as far
        self.moved_at = 0.0  # when an operation was last through, by monotonic()
        self.joined_until = 0  # up to which sequence number this rank takes part with zeros
        self._running: dict[int, Operation] = {}  # by sequence number
        self._sizes = reducer.sizes(lanes.sizes)
        self.records = LaneRecords(lanes.telemetry, plan, reducer, self._sizes.reason)
        self.verification = LaneVerification(group, verify)
        self._observation = Observation(group, len(plan.slots))
        self.abandonment = Abandonment(self)
        self.lock = threading.Lock()
        self.steps = 0  # steps that are over, the same on all ranks; also abandoned ones and those of zeros
        self._titles: list[str] = []  # of pieces
        self._is_lossy: list[bool] = []  # by piece
        self.arrangement = self._arrange()
        self.verifies: bool  # True if the step ends with an exchange of words about parameters
        self.step: LaneStep
        self._new_step()

    # -- the training thread ------------------------------------------------------------------------------------------

    def small(self, slot: int) -> Any:
        """Return the flat memory into which the gradient of a small slot is copied; None for a large slot."""
        return self.reducer.small(slot)

    def ready(self, slot: int, offer: Any, since: float | None = None) -> None:
        """Hand over this rank's complete gradient of a slot; see ``ready_all``."""
        self.ready_all((slot,), (offer,), (since,))

    def ready_all(self, slots: Sequence[int], offers: Sequence[Any], since: Sequence[float | None]) -> None:
        """Hand over this rank's complete gradients. They are the engine's until ``finish``, and hold the results then.

        ``offers``: for each slot an Offer of flat memory; FILLED for a small slot, whose gradient was copied to
        ``small``; None for zeros. ``since`` (perf_counter): when each was complete, None for now, UNSEEN if unknown.
        """
        self.reducer.offer(slots, offers)
        mark = self.reducer.mark() if self.on_device else None
        with self.lock:
            step = self.step
            if not step.ready.isdisjoint(slots):
                names = [self.slots[slot].name for slot in slots if slot in step.ready]
                raise AssertionError(f"slots {names} were handed over twice in one step")
            if self.steps == 0:
                for slot, at in zip(slots, since, strict=True):
                    self._observation.sees(slot, at)
            complete = step.hand_over(slots, mark)
            if self.lanes.telemetry.timeline is not None:
                for bucket in complete:
                    self.records.waits(bucket)  # before the driver may start it
        if complete and not self.takes_turns:
            self._driver.wake()

    def unready_slots(self) -> list[int]:
        """Return the slots not handed over in this step."""
        with self.lock:
            ready, slots = self.step.ready, range(len(self.slots))
            return [slot for slot in slots if slot not in ready] if ready else list(slots)

    @property
    def in_flight(self) -> bool:
        """True if a slot was handed over in this step, or will be."""
        return self.step.begun or bool(self.step.ready)

    def finish(self) -> None:
        """Wait until every bucket is reduced; every slot must be ready. Raises HorovodInternalError if that fails."""
        step = self.steps
        assert len(self.step.ready) == len(self.slots), "finish() before every slot was ready"
        if self.verifies:
            self.verification.prepare()
        self.step.finishing = True
        self.end()
        self.abandonment.use(step)

    def end(self) -> None:
        """Wait for the end of the step, and begin the next one."""
        started = perf_counter()
        self.lanes.waiting.wait(self, self._is_over)
        if self.lanes.telemetry.timeline is not None:
            self.records.awaited(started)
        if self.error is not None:
            raise self.error
        if self.step.completed < self.step.operations:
            self.abandonment.refuse()
        with self.lock:
            self._end_step()

    def _is_over(self) -> bool:
        """True if the step is over, or cannot come to its end because another rank abandoned it."""
        step = self.step
        is_over = self.error is not None or step.completed == step.operations
        return is_over or (self.steps in self.abandonment.ranks and not self.on_device)

    def give_zeros(self) -> None:
        """Hand over zeros for all gradients that are not there yet, and have all that is left run."""
        unready = self.unready_slots()
        self.ready_all(unready, [None] * len(unready), [None] * len(unready))
        self.step.finishing = True
        self._driver.wake()

    def close(self) -> None:
        """Forget the plan and its memory; the layout stays, for zeros if this rank joins while others go on."""
        self.closed = True
        if self.error is None:
            self.abandonment.decline()
        self.lanes.keep_closed(self)
        if self.error is not None or not self.step.in_flight:
            self.reducer.end_step()
        self.reducer.forget(quiet=self.is_left)
        self.lanes.give_number_back_later(self)

    # -- the engine's driver ------------------------------------------------------------------------------------------

    @property
    def is_left(self) -> bool:
        """True if the lane was closed and none of its operations is open here."""
        return self.closed and self.error is None and not self.step.in_flight

    def idle(self) -> bool:
        """True if no operation of this lane is in flight and the step is over or has not begun."""
        return self.error is not None or self.step.completed == self.step.operations

    def startable(self) -> bool:
        """True if the next operation in the agreed order may start now."""
        step = self.step
        if step.started == step.operations or (self.takes_turns and not step.finishing) or self.error is not None:
            return False
        with self.lock:  # the training thread may be handing gradients over
            return self.step.may_start(self.sequence)

    @property
    def caught_up(self) -> bool:
        """True if this rank, which has joined, started with zeros all operations that others started, or cannot."""
        return self.error is not None or self.sequence >= self.joined_until

    def zeros_startable(self) -> bool:
        """True if this rank has joined, others started the next operation, and it may start here."""
        step = self.step
        if self.error is not None or self.sequence >= self.joined_until or not step.has_room(self.sequence):
            return False
        return step.started < len(step.pieces) or step.may_exchange()

    def start(self, joined: bool = False) -> Operation:
        """Start the next operation of this step; with zeros, as a rank that has joined does."""
        step, sequence = self.step, self.sequence
        index = step.start(sequence)
        self.sequence += 1
        tag, started = lane_tag(self._number, sequence), perf_counter()
        on_begin = None
        if index < len(step.pieces):
            piece = step.pieces[index]
            marks = [self.reducer.mark()] if joined else step.marks.get(piece.bucket, ())
            on_begin = None if self.lanes.telemetry.timeline is None else self.records.begin(index)
            steps = self.reducer.reduce(piece, joined, marks, tag, on_begin)
            what = self._titles[index]
        elif self.steps == 0 and index == len(step.pieces):
            steps, what = self._observation.exchange(tag, joined), f"the gradient order of {self.name}"
        else:
            what = f"the comparison of parameters of {self.name}"
            steps = self.verification.exchange(joined, tag)

        def completed(_: Any) -> None:
            del step.in_flight[sequence], self._running[sequence]
            self.moved_at = monotonic()
            if index < len(step.pieces):
                if on_begin is not None or self._is_lossy[index]:
                    self.records.reduced(index)
                self.lanes.telemetry.statistics.reduced(self.arrangement.nbytes[index], perf_counter() - started)
            step.completed += 1  # from here on the training thread may begin the next step
            if self.closed and not step.in_flight:
                self.reducer.end_step()  # until now others have read and written what was offered
                self.lanes.give_number_back_later(self)
            # The training thread of a joined rank is in join(): nobody else will begin the next step.
            if joined and step.completed == step.operations:
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

    def waiting_for(self) -> str:
        """Return the operation that this lane waits for, for messages."""
        return self.records.waiting_for(self.step.completed)

    def _arrange(self) -> Arrangement:
        """Return the buckets, pieces and their order, by the time at which each slot is ready, and lay them out."""
        plan, share = self.plan, sent_share(self.group.size, self.reducer.layout)
        codecs, network, ready_at = plan.reduction.codecs, self.lanes.network, self._observation.ready_at
        arrangement = arrange(
            plan.slots, ready_at, plan.groups, self._sizes, network, share, not self.on_device, codecs
        )
        self._is_lossy = [codecs[arrangement.buckets[piece.bucket].codec].lossy for piece in arrangement.pieces]
        self._titles = [
            f"{f'part {piece.part} of ' if piece.parts > 1 else ''}bucket {piece.bucket} of {self.name}"
            for piece in arrangement.pieces
        ]
        self.reducer.lay_out(arrangement)
        return arrangement

    def _new_step(self) -> None:
        self.verifies = self.verification.begin_step(self.steps)
        self.step = LaneStep(self.arrangement, self._sizes.in_flight, int(self.steps == 0) + int(self.verifies))

    def _end_step(self) -> None:
        """Begin the next step; after the first one in the order that rank 0 observed."""
        self.reducer.end_step()
        self.steps += 1
        self.records.step_ended(self.steps)
        if self.steps == 1:
            self.arrangement = self._arrange()
        self._new_step()
