"""The names of a lane's operations, and their records in the timeline and the statistics."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter

from hvdkit.engine.steps.plan import Arrangement, Plan
from hvdkit.engine.steps.reducer import ReadyAt, Reducer
from hvdkit.engine.telemetry.compression_report import timeline_fields
from hvdkit.engine.telemetry.telemetry import Telemetry, last_of
from hvdkit.engine.telemetry.timeline import COMPUTATION, TRAINING
from hvdkit.errors import abridged


class LaneRecords:
    """The records of the buckets and pieces of one lane, in their present arrangement."""

    def __init__(self, telemetry: Telemetry, plan: Plan, reducer: Reducer, reason: str) -> None:
        self._telemetry = telemetry
        self._reason = reason  # of the sizes of pieces
        self._plan = plan
        self._reducer = reducer
        self._step_began = perf_counter()
        self._begun: dict[int, float] = {}  # when the reductions of pieces began, while they are recorded
        self._complete: dict[int, float] = {}  # since when buckets that wait for their turn are, while it is recorded

    @property
    def _arrangement(self) -> Arrangement:
        return self._reducer.arrangement

    def waits(self, bucket: int) -> None:
        """Note that all slots of a bucket are ready, so that it waits for its turn. Writes nothing: a lock is held."""
        self._complete[bucket] = perf_counter()

    def copied(self, slots: Sequence[int], started: float) -> None:
        """Record that gradients were copied into their slots between ``started`` (perf_counter) and now."""
        if (timeline := self._telemetry.timeline) is None:
            return
        ended, names = perf_counter(), defaultdict[str, list[str]](list)
        for slot in slots:
            names[self._row(self._arrangement.bucket_of[slot])].append(self._plan.slots[slot].name)
        for row, tensors in names.items():
            timeline.span(row, "MEMCPY_IN_FUSION_BUFFER", started, ended, tensor=", ".join(tensors))

    def begin(self, index: int) -> Callable[[ReadyAt | None], None]:
        """Record that a piece's turn has come. Return the function that records that its reduction begins."""
        self._waited(self._arrangement.pieces[index].bucket)
        return partial(self._reduction_begins, index, perf_counter())

    def _reduction_begins(self, index: int, started: float, ready_at: ReadyAt | None) -> None:
        """Record the end of the wait for other ranks, and that the reduction begins; see ``Reducer.reduce``."""
        if (timeline := self._telemetry.timeline) is None:
            return
        row, arrangement = self._piece_row(index), self._arrangement
        if ready_at is not None and (last := last_of(ready_at())) is not None:
            timeline.span(row, last.activity, started, perf_counter(), **last.fields)
        timeline.begin(
            row,
            "ALLREDUCE",
            bytes=arrangement.nbytes[index],
            codec=self._reducer.residuals.codec(arrangement.pieces[index].bucket).summary,
            algorithm=self._reducer.reason,
            order=f"{index + 1} of {len(arrangement.pieces)}: {arrangement.reasons[index]}",
            size=self._reason,
        )
        self._begun[index] = perf_counter()

    def reduced(self, index: int) -> None:
        """Count the effect of a codec on a reduced piece, and record its end in the timeline."""
        piece, residuals = self._arrangement.pieces[index], self._reducer.residuals
        begun, timeline = self._begun.pop(index, None), self._telemetry.timeline
        if residuals.codec(piece.bucket).lossy:
            tally = residuals.finished(piece)
            if begun is not None and timeline is not None and residuals.encodes(piece.bucket):
                fields = timeline_fields(tally, self._reducer.residual_norm(piece))
                timeline.span(self._piece_row(index), "COMPRESSION", begun, perf_counter(), **fields)
        if begun is not None:
            self._telemetry.end(self._piece_row(index))

    def awaited(self, started: float) -> None:
        """Record that the training thread waited for gradients since ``started`` (perf_counter)."""
        if (timeline := self._telemetry.timeline) is not None:
            timeline.span(COMPUTATION, "WAIT_FOR_GRADIENTS", started, perf_counter(), of=self._plan.name)

    def step_ended(self, number: int) -> None:
        """Record that a step is over."""
        now, timeline = perf_counter(), self._telemetry.timeline
        if timeline is not None:
            timeline.span(f"{TRAINING}steps of {self._plan.name}", f"STEP {number}", self._step_began, now)
        self._step_began = now

    def failed(self) -> None:
        """End all open records, because the lane failed."""
        for bucket in list(self._complete):
            self._waited(bucket)
        for index in range(len(self._arrangement.pieces)):
            self._telemetry.end(self._piece_row(index))

    def names_in(self, index: int) -> list[str]:
        """Return the names of the tensors of an operation of a step."""
        if index >= len(self._arrangement.pieces):
            return []
        return [
            self._plan.slots[slot].name
            for slot in self._arrangement.buckets[self._arrangement.pieces[index].bucket].slots
        ]

    def waiting_for(self, index: int) -> str:
        """Return the operation with this index, for messages."""
        names, pieces = abridged(self.names_in(index)), self._arrangement.pieces
        return f"optimizer '{self._plan.name}', operation {index} of {len(pieces)} ({names})"

    def _waited(self, bucket: int) -> None:
        """Record the end of a bucket's wait for its turn, if it waited."""
        since, timeline = self._complete.pop(bucket, None), self._telemetry.timeline
        if since is not None and timeline is not None:
            timeline.span(self._row(bucket), "WAIT_FOR_TURN", since, perf_counter())

    def _row(self, bucket: int) -> str:
        return f"{self._plan.name}/bucket{bucket}"

    def _piece_row(self, index: int) -> str:
        piece = self._arrangement.pieces[index]
        return self._row(piece.bucket) + (f".{piece.part}" if piece.parts > 1 else "")
