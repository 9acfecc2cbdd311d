"""What a lane's operations are called, and what the timeline and the statistics are told of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from time import perf_counter

from hvdkit.collectives.group import Steps
from hvdkit.engine.steps.arrangement import Arrangement
from hvdkit.engine.steps.plan import Plan
from hvdkit.engine.steps.reducer import Reducer
from hvdkit.engine.steps.schedule import Piece
from hvdkit.engine.telemetry.compression_report import timeline_fields
from hvdkit.engine.telemetry.telemetry import Telemetry


class LaneRecords:
    """Of the buckets and pieces of one lane, in their present arrangement."""

    def __init__(self, telemetry: Telemetry, plan: Plan, reducer: Reducer, reason: str) -> None:
        self._telemetry = telemetry
        self._reason = reason  # of the sizes of pieces
        self._plan = plan
        self._reducer = reducer

    @property
    def _now(self) -> Arrangement:
        return self._reducer.arrangement

    def waits(self, bucket: int) -> None:
        """All slots of a bucket are ready; its pieces wait for those before them."""
        self._telemetry.begin(self._row(bucket), "WAIT_FOR_TURN")

    def copied(self, slots: Sequence[int], started: float) -> None:
        """Gradients were copied into their slots between ``started`` (perf_counter) and now."""
        timeline = self._telemetry.timeline
        if timeline is None:
            return
        ended, names = perf_counter(), defaultdict[str, list[str]](list)
        for slot in slots:
            names[self._row(self._now.bucket_of[slot])].append(self._plan.slots[slot].name)
        for row, tensors in names.items():
            timeline.span(row, "MEMCPY_IN_FUSION_BUFFER", started, ended, tensor=", ".join(tensors))

    def reduction(self, index: int, joined: bool, steps: Steps[None]) -> Steps[None]:
        """``steps``, which reduce a piece, recorded."""
        telemetry, now = self._telemetry, self._now
        piece, row, nbytes = now.pieces[index], self._piece_row(index), now.nbytes[index]
        started = perf_counter()
        if piece.part == 0 and not joined:
            telemetry.end(self._row(piece.bucket))  # its wait for its turn
        telemetry.begin(
            row,
            "ALLREDUCE",
            bytes=nbytes,
            codec=self._reducer.residuals.codec(piece.bucket).summary,
            algorithm=self._reducer.reason,
            order=f"{index + 1} of {len(now.pieces)}: {now.reasons[index]}",
            size=self._reason,
        )
        yield from steps
        if self._reducer.residuals.codec(piece.bucket).encodes:
            self._encoding_ended(piece, row, started)
        telemetry.end(row)
        telemetry.statistics.reduced(nbytes, perf_counter() - started)

    def ended(self, index: int) -> None:
        """A piece will not be reduced to its end."""
        self._telemetry.end(self._piece_row(index))

    def names_in(self, index: int) -> list[str]:
        """The tensors of an operation of a step, for messages."""
        if index >= len(self._now.pieces):
            return []
        return [self._plan.slots[slot].name for slot in self._now.buckets[self._now.pieces[index].bucket].slots]

    def waiting_for(self, index: int) -> str:
        """What a lane is at, for messages."""
        names = self.names_in(index)
        first = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        return f"optimizer '{self._plan.name}', operation {index} of {len(self._now.pieces)} ({first})"

    def summary(self, index: int) -> str:
        """A piece, for messages."""
        piece = self._now.pieces[index]
        part = f"part {piece.part} of " if piece.parts > 1 else ""
        return f"{part}bucket {piece.bucket} of {self._plan.name}"

    def _row(self, bucket: int) -> str:
        return f"{self._plan.name}/bucket{bucket}"

    def _piece_row(self, index: int) -> str:
        piece = self._now.pieces[index]
        return self._row(piece.bucket) + (f".{piece.part}" if piece.parts > 1 else "")

    def _encoding_ended(self, piece: Piece, row: str, started: float) -> None:
        """Count what a piece of a bucket of a lossy codec took, and show it."""
        tally, timeline = self._reducer.residuals.finished(piece), self._telemetry.timeline
        if timeline is not None and self._reducer.residuals.encodes(piece.bucket):
            norm = self._reducer.residual_norm(piece)
            timeline.span(row, "COMPRESSION", started, perf_counter(), **timeline_fields(tally, norm))
