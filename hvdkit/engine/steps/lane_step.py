"""The progress of one step of a lane: the gradients that are there, and the operation that may start next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hvdkit.engine.ranks.assignments import SPAN
from hvdkit.engine.steps.plan import Arrangement


class LaneStep:
    """The state of one step. Its operations are the pieces of ``arrangement`` in order, then ``exchanges`` of facts.

    ``budget``: the most bytes in flight. The lane's lock protects what the training thread and the driver both use.
    """

    __slots__ = (
        "_bucket_of", "_budget", "_loads", "begun", "completed", "finishing", "in_flight", "left", "marks",
        "operations", "pieces", "ready", "started",
    )  # fmt: skip

    def __init__(self, arrangement: Arrangement, budget: float, exchanges: int) -> None:
        self._bucket_of, self._loads, self._budget = arrangement.bucket_of, arrangement.loads, budget
        self.pieces = arrangement.pieces
        self.operations = len(self.pieces) + exchanges
        self.begun = False  # a gradient is complete that will be handed over
        self.finishing = False  # all gradients were handed over, and the training thread waits
        self.ready: set[int] = set()  # slots handed over
        self.left = arrangement.slots_of.copy()  # by bucket: slots not handed over
        self.marks: dict[int, list[Any]] = {}  # by bucket: of the threads that wrote its gradients, on a device
        self.in_flight: dict[int, int] = {}  # loads of operations that were started, by sequence number
        self.started = self.completed = 0  # operations

    def hand_over(self, slots: Sequence[int], mark: Any) -> list[int]:
        """Count slots as ready. Return the buckets that are complete with them."""
        complete = []
        for slot in slots:
            self.ready.add(slot)
            bucket = self._bucket_of[slot]
            if mark is not None:
                self.marks.setdefault(bucket, []).append(mark)
            self.left[bucket] -= 1
            if self.left[bucket] == 0:
                complete.append(bucket)
        return complete

    def may_start(self, sequence: int) -> bool:
        """True if the next operation, which has this sequence number, may start."""
        if self.started == self.operations or (self.in_flight and not self.has_room(sequence)):
            return False
        if self.started < len(self.pieces):
            return self.left[self.pieces[self.started].bucket] == 0
        return self.finishing and self.may_exchange()

    def may_exchange(self) -> bool:
        """True if all operations so far are over and the next is an exchange: one exchange comes after the other."""
        return len(self.pieces) <= self.started == self.completed < self.operations

    def has_room(self, sequence: int) -> bool:
        """True if the operations in flight leave room for the next operation, which has this sequence number."""
        if not self.in_flight:
            return True
        nbytes = self._loads[self.started] if self.started < len(self._loads) else 0
        near = sequence - min(self.in_flight) < SPAN
        return near and sum(self.in_flight.values()) + nbytes <= self._budget

    def start(self, sequence: int) -> int:
        """Count the next operation as started. Return its index in the step."""
        index, self.started = self.started, self.started + 1
        self.in_flight[sequence] = self._loads[index] if index < len(self._loads) else 0
        return index
