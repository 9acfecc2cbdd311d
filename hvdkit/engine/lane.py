"""The planned channel: a plan's buckets run in the order all ranks agreed on, with no word exchanged about it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from hvdkit.collectives.allreduce import allreduce
from hvdkit.collectives.group import Group, Steps
from hvdkit.compression import CODECS
from hvdkit.engine.buckets import Buckets
from hvdkit.engine.operation import Operation
from hvdkit.engine.plan import Slot, first_order, lay_out, observed_order
from hvdkit.errors import HorovodInternalError
from hvdkit.kernels import ReduceOp

if TYPE_CHECKING:
    from hvdkit.engine.core import Engine

# Tags of lanes lie above those of named operations: lane, then place in the lane's sequence, then phase.
LANE_TAG = 1 << 21
LANES, SEQUENCE, PHASES = 512, 512, 8


def lane_tag(lane: int, sequence: int) -> int:
    """The first tag of the ``sequence``-th operation of a lane."""
    return LANE_TAG | (lane % LANES * SEQUENCE + sequence % SEQUENCE) * PHASES


class Lane:
    """The buckets of one plan on this rank.

    A training thread writes gradients into slots and hands them over with ``ready``; the engine's driver starts a
    bucket when all of its slots are ready and all earlier buckets were started. The first step ends with one small
    allreduce in which all ranks adopt the order that rank 0 observed and combine their flags. Buffers are what ``home``
    allocates, numpy arrays or tensors of a device; here they are only sliced and assigned to.
    """

    def __init__(
        self,
        engine: Engine,
        lane_id: int,
        name: str,
        slots: Sequence[Slot],
        group: Group,
        home: Buckets,
        codec: str,
        groups: Sequence[Sequence[int]],
    ) -> None:
        self.name = name
        self.lane_id = lane_id
        self.slots = list(slots)
        self.group = group
        self.generation = 0
        self.first_step = True
        self.error: HorovodInternalError | None = None
        self.sequence = 0  # operations started since registration, the same on all ranks that are as far
        self.joined_until = 0  # up to which sequence number this rank takes part with zeros
        self.home = home
        self._buffers: list[Any] = []
        self._views: dict[int, Any] = {}
        self._bucket_of: dict[int, int] = {}
        self._engine = engine
        self._codec = codec
        self._groups = [list(members) for members in groups]
        self._lock = threading.Lock()
        self._observed: list[int] = []
        self._flags = bytes(len(slots))
        self._combined_flags: bytes | None = None
        self._lay_out(first_order(len(slots)))

    # -- the training thread ------------------------------------------------------------------------------------------

    @property
    def on_device(self) -> bool:
        """Whether slots are tensors of a device, not numpy arrays."""
        return self.home.on_device

    def slot_array(self, slot: int) -> Any:
        """The slot's flat memory in its fusion buffer. Fetch it again when ``generation`` has changed."""
        return self._views[slot]

    def ready(self, slot: int) -> None:
        """Slot ``slot`` holds this rank's gradient; it is the engine's until ``finish``."""
        mark = self.home.mark()
        with self._lock:
            if slot in self._ready:
                raise AssertionError(f"slot {self.slots[slot].name!r} was handed over twice in one step")
            self._ready.add(slot)
            if self.first_step:
                self._observed.append(slot)
            bucket = self._bucket_of[slot]
            if mark is not None:
                self._marks[bucket].append(mark)
            self._left[bucket] -= 1
            complete = self._left[bucket] == 0
        if complete:
            self._engine.timeline_begin(self._row(bucket), "WAIT_FOR_TURN")
            self._engine.wake()

    def copied(self, slot: int, started: float) -> None:
        """For the timeline: the gradient was copied into its slot between ``started`` (perf_counter) and now."""
        timeline = self._engine.timeline
        if timeline is not None:
            row = self._row(self._bucket_of[slot])
            timeline.span(row, "MEMCPY_IN_FUSION_BUFFER", started, perf_counter(), tensor=self.slots[slot].name)

    def unready_slots(self) -> list[int]:
        """The slots not handed over in this step."""
        with self._lock:
            return [slot for slot in range(len(self.slots)) if slot not in self._ready]

    @property
    def in_flight(self) -> bool:
        """Whether some slot was handed over in this step."""
        return bool(self._ready)

    def finish(self, flags: bytes | None = None) -> bytes | None:
        """Wait until every bucket is reduced. Every slot must be ready.

        Returns, at the end of the first step, the maximum over all ranks of ``flags`` (one byte a slot), else None.
        Raises HorovodInternalError where a rank is lost or does something else.
        """
        assert not self.unready_slots(), "finish() before every slot was ready"
        if flags is not None:
            self._flags = flags
        first = self.first_step
        self._finishing = True
        self._engine.drive_lane(self)
        if self.error is not None:
            raise self.error
        with self._lock:
            self._end_step()
        return self._combined_flags if first else None

    def abandon(self) -> None:
        """Drop the step: what was handed over is waited out with zeros for the rest, and its results are not used."""
        if self.in_flight and self.error is None:
            for slot in self.unready_slots():
                self.slot_array(slot)[...] = 0
                self.ready(slot)
            self.finish()

    def close(self) -> None:
        """Forget the plan and its memory; the layout stays, for zeros if this rank joins while others go on."""
        self._buffers, self._views = [], {}
        self._engine.forget_lane(self)

    # -- the engine's driver ------------------------------------------------------------------------------------------

    def idle(self) -> bool:
        """Whether nothing of this lane is on the wire and the step is over or has not begun."""
        return self.error is not None or self._completed == self._planned()

    def startable(self) -> bool:
        """Whether the next operation in the agreed order may start now."""
        with self._lock:  # the training thread may be laying the buckets out anew
            return self._may_start()

    def _may_start(self) -> bool:
        if self.error is not None or self._started - self._completed >= self._engine.settings.max_buckets_in_flight:
            return False
        if self._started < len(self._buckets):
            return self._left[self._started] == 0
        # The exchange of observations comes after all buckets, when the training thread has set its flags.
        return self._finishing and self._started < self._planned() and self._completed == len(self._buckets)

    def start(self) -> Operation:
        """Start the next operation of this step."""
        place = self._started
        self._started += 1
        if place < len(self._buckets):
            self._engine.timeline_end(self._row(place))
            steps = self._reduce(self._buffers[place], self._marks[place], place, self._next_tag())
            what = f"bucket {place} of {self.name}"
        else:
            steps = self._exchange_observations(self._observed, self._flags, self._next_tag())
            what = f"the gradient order of {self.name}"
        return self._operation(what, steps)

    def zeros_startable(self) -> bool:
        """Whether this rank has joined, others have started the next operation, and it may start here."""
        return (
            self.error is None
            and self.sequence < self.joined_until
            and self._started < self._planned()
            and (self._started < len(self._buckets) or self._completed == len(self._buckets))
        )

    def start_zeros(self) -> Operation:
        """Start the next operation with zeros, as a rank that has joined does."""
        place = self._started
        self._started += 1
        if place < len(self._buckets):
            zeros = self.home.zeros(self._buckets[place])
            steps = self._reduce(zeros, [self.home.mark()], place, self._next_tag())
            return self._operation(f"bucket {place} of {self.name} (joined)", steps, joined=True)
        steps = self._exchange_observations([], bytes(len(self.slots)), self._next_tag())
        return self._operation(f"the gradient order of {self.name} (joined)", steps, joined=True)

    def fail(self, error: HorovodInternalError) -> None:
        """End every wait on this lane with ``error``; the lane is of no use afterwards."""
        if self.error is None:
            self.error = error
            for place in range(min(self._completed, len(self._buckets)), min(self._started, len(self._buckets))):
                self._engine.timeline_end(self._row(place))

    def names_in(self, place: int) -> list[str]:
        """The tensors of a bucket, for messages."""
        return [self.slots[slot].name for slot in self._buckets[place].slots] if place < len(self._buckets) else []

    def waiting_for(self) -> str:
        """What this lane is at, for messages."""
        names = self.names_in(self._completed)
        told = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        return f"optimizer '{self.name}', bucket {self._completed} of {len(self._buckets)} ({told})"

    # -- inside -------------------------------------------------------------------------------------------------------

    def _planned(self) -> int:
        return len(self._buckets) + self.first_step

    def _row(self, place: int) -> str:
        return f"{self.name}/bucket{place}"

    def _lay_out(self, order: Sequence[int]) -> None:
        """New buckets and buffers. Gradients that still are views of the old ones keep those alive."""
        engine = self._engine
        self._buckets = lay_out(self.slots, order, engine.settings.fusion_threshold, self._groups)
        self._buffers, self._views, self._bucket_of = [], {}, {}
        for place, bucket in enumerate(self._buckets):
            buffer = self.home.allocate(bucket)
            self._buffers.append(buffer)
            for slot, offset in zip(bucket.slots, bucket.offsets, strict=True):
                self._views[slot] = buffer[offset : offset + self.slots[slot].elements]
                self._bucket_of[slot] = place
        self._begin_step()

    def _end_step(self) -> None:
        """Ready for the next step; after the first one in the order that rank 0 observed, values carried over."""
        if self.first_step:
            self.first_step = False
            self.generation += 1
            old = self._views
            self._lay_out(self._next_order)
            for slot, view in old.items():
                self._views[slot][...] = view
            if not old:  # closed: nobody will write gradients here
                self._buffers, self._views = [], {}
        self._begin_step()

    def _begin_step(self) -> None:
        self._finishing = False
        self._ready: set[int] = set()
        self._left = [len(bucket.slots) for bucket in self._buckets]
        self._marks: list[list[Any]] = [[] for _ in self._buckets]
        self._started = 0
        self._completed = 0

    def _next_tag(self) -> int:
        """The tag of the operation that starts now. All ranks start the operations of a lane in the same order."""
        tag = lane_tag(self.lane_id, self.sequence)
        self.sequence += 1
        return tag

    def _operation(self, what: str, steps: Steps[None], joined: bool = False) -> Operation:
        def completed(_: Any) -> None:
            self._completed += 1
            # The training thread of a joined rank is in join(): nobody else will begin the next step.
            if joined and self._completed == self._planned():
                self._end_step()
                self._engine.wake()

        return Operation(what, steps, self._engine.transport, completed, self.group.members)

    def _reduce(self, buffer: Any, marks: Sequence[Any], place: int, tag: int) -> Steps[None]:
        row, nbytes = self._row(place), self._buckets[place].nbytes
        started = perf_counter()
        self._engine.timeline_begin(row, "ALLREDUCE", bytes=nbytes, codec=self._codec)
        yield from self.home.reduce(buffer, marks, tag)
        self._engine.timeline_end(row)
        self._engine.statistics.reduced(nbytes, perf_counter() - started)

    def _exchange_observations(self, observed: Sequence[int], flags: bytes, tag: int) -> Steps[None]:
        """Rank 0's order and everyone's flags, in one allreduce of their maximum."""
        count = len(self.slots)
        message = np.full(2 * count, -1, dtype=np.int32)
        if self.group.rank == 0:
            message[:count] = observed_order(observed, count)
        message[count:] = np.frombuffer(flags, dtype=np.uint8)
        yield from allreduce(self.group, message, ReduceOp.MAX, 1.0, CODECS["none"], tag)
        self._combined_flags = message[count:].astype(np.uint8).tobytes()
        self._next_order = message[:count].tolist()
