"""A group of ranks whose collective calls match by their order: each has a number, and begins after those before it."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Sequence
from functools import partial
from itertools import islice
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from hvdkit.collectives.group import Group, Steps
from hvdkit.engine.loop.completion import HALT_SECONDS, Completion
from hvdkit.engine.loop.messages import GroupFailed
from hvdkit.engine.loop.operation import Operation
from hvdkit.engine.ordered.between_nodes import NetworkRunner
from hvdkit.engine.ordered.calls import Collective
from hvdkit.engine.ordered.within_node import NodeRunner
from hvdkit.engine.ranks.groups import layout_of, ordered_segment, turns_of
from hvdkit.engine.ranks.turns import BUSY, COMPLETE
from hvdkit.errors import ForkedChildError, HorovodInternalError, MismatchError, StallError, in_words

if TYPE_CHECKING:
    from hvdkit.engine.loop.driver import Driver
    from hvdkit.engine.loop.waiting import WaitingThreads
    from hvdkit.engine.session.core import Engine

# A rank that calls an operation and waits for it spins for the other ranks so long, before it sleeps. Waking up takes
# most of a millisecond, in which the other ranks' next operation misses this rank, and so on. Therefore the operation
# after one that ended soon after all spins longer, once: then the ranks are in step again.
PATIENCE_SECONDS, NEXT_PATIENCE_SECONDS = 200e-6, 2e-3


class Runner(Protocol):
    """The algorithms for the calls of one group, of which ``most_in_flight`` may run at once."""

    most_in_flight: int

    def run_now(self, call: Collective, number: int, seconds: float) -> int:
        """Try for ``seconds`` to run a call at once; return the state of its turn."""

    def run(self, call: Collective, number: int, has_arrived: bool) -> Steps[None]:
        """Run a call. ``has_arrived``: its part is published already. Raises MismatchError on all ranks."""

    def close(self) -> None:
        """Give the memory of the group back."""


class OrderedOperation(Completion):
    """A call in its place in the order of a group. ``has_arrived``: its part is published already."""

    def __init__(self, group: OrderedGroup, call: Collective, number: int, has_arrived: bool) -> None:
        super().__init__(group.waiting)
        self.group, self.call, self.number, self.has_arrived = group, call, number, has_arrived
        self.is_through = False  # it ends once all before it have ended
        self.failure: Exception | None = None  # why it ends with an error, if it does

    def __str__(self) -> str:
        return f"operation {self.number} of group '{self.group.name}', {self.call.description}"

    def stalled(self, seconds: float) -> str:
        return self.group.stalled(self, seconds)


class OrderedGroup:
    """The calls of one group, in order. Only the ranks ``members`` make it, together."""

    def __init__(
        self, engine: Engine, group: Group, runner: Runner, number: int, name: str, seconds: float, spins: bool
    ) -> None:
        self._engine, self._runner = engine, runner
        self.group, self.number, self.name, self.seconds = group, number, name, seconds
        self._spins, self._patience = spins, PATIENCE_SECONDS
        self.lock = threading.RLock()  # callers and the driver take the queue in turn
        self._queue: deque[OrderedOperation] = deque()  # the first ones run
        self._running: dict[OrderedOperation, Operation] = {}
        self.calls = 0
        self._process = os.getpid()
        self._error: HorovodInternalError | None = None

    @property
    def waiting(self) -> WaitingThreads:
        return self._engine.waiting

    @property
    def _driver(self) -> Driver:
        return self._engine.driver

    def run(self, call: Collective) -> OrderedOperation | None:
        """Run a call and wait for it. Return None if it is done, else the operation to wait for."""
        with self.lock:
            number = self._next_number()
            state = BUSY
            # What else is in flight must go on meanwhile, and other ranks may wait for it.
            if self._spins and not self._queue and not self._engine.rounds.busy():
                state = self._runner.run_now(call, number, self._patience)
                self._patience = PATIENCE_SECONDS
                if state == COMPLETE:
                    call.finished()
                    return None
            return self._append(call, number, state != BUSY)

    def start(self, call: Collective) -> OrderedOperation:
        """Start a call, and return the operation."""
        with self.lock:
            operation = self._append(call, self._next_number(), False)
        if call.steps is None:
            # It costs less than to wake another thread, which the other ranks do once they are there.
            self._driver.visit()
        else:
            self._driver.wake()  # to encode takes long, and the caller has other work
        return operation

    def stalled(self, operation: OrderedOperation, seconds: float) -> str:
        """Return why an operation is not done after ``seconds``, for an error."""
        running = self._running.get(operation) or next(iter(self._running.values()), None)
        awaited = sorted(running.awaited_peers()) if running is not None else []
        return (
            f"{self._engine.mailbox.me()} waited {seconds:g} s in {operation} for ranks {awaited}: timed out.\n"
            "HINT: all ranks of a group must call the same operations in the same order; if a rank may come later, "
            "give the group a longer timeout."
        )

    def look(self, now: float) -> None:
        """End all calls with an error if the first of them has taken longer than the group's timeout."""
        with self.lock:
            operation = self._queue[0] if self._queue else None
        if operation is not None and now - operation.since > self.seconds:
            self.fail(StallError(self.stalled(operation, self.seconds)))

    def fail(self, error: HorovodInternalError) -> None:
        """End all calls with an error. Later calls raise it too: the ranks may be at different places of the order."""
        with self.lock:
            if self._error is None:
                self._error = error
            queue = list(self._queue)
            self._queue.clear()
        running, self._running = self._running, {}
        for each in running.values():
            if each in self._engine.operations:
                self._engine.operations.remove(each)
        for operation in queue:
            operation.end(error)

    def tell_failure(self, text: str) -> None:
        """Have all calls on the other ranks of the group end with an error of this text."""
        others = [rank for rank in self.group.members if rank != self.group.members[self.group.rank]]
        self._engine.mailbox.tell_later(others, GroupFailed(self.number, text))

    def close(self) -> None:
        """End the group on this rank, and give its memory back when its last rank does."""
        if os.getpid() != self._process:
            return
        error = HorovodInternalError(f"group '{self.name}' was destroyed on {self._engine.mailbox.me()}")
        with self._driver.halted(HALT_SECONDS):
            self.fail(error)
            self._engine.messages.fail(error, self)
            self._engine.ordered.pop(self.number, None)
            self._runner.close()

    def check_process(self) -> None:
        """Raise ForkedChildError in a process that was forked from the rank."""
        if os.getpid() != self._process:
            raise ForkedChildError(self._engine.mailbox.me(), self._process)

    def _next_number(self) -> int:
        self.check_process()
        if self._error is not None:
            raise _again(self._error) from self._error
        self.calls += 1
        return self.calls

    def _append(self, call: Collective, number: int, has_arrived: bool) -> OrderedOperation:
        operation = OrderedOperation(self, call, number, has_arrived)
        self._queue.append(operation)
        if len(self._queue) <= self._runner.most_in_flight:
            self._driver.inbox.append(self._begin)
        return operation

    def _begin(self) -> None:
        """Run the first operations of the queue; on the driver's thread."""
        if (error := self._engine.mailbox.error) is not None:
            self.fail(error)
            return
        with self.lock:
            first = list(islice(self._queue, self._runner.most_in_flight))
        for place, operation in enumerate(first):
            if operation.failure is not None or _share_memory(operation, first[:place]):
                return  # those after it wait for it, or never run
            if operation not in self._running:
                operation.since = monotonic()
                steps, ended = self._steps(operation), partial(self._ended, operation)
                running = Operation(operation, steps, self.group.transport, ended, self.group.members, self.fail)
                self._running[operation] = running
                self._engine.operations.append(running)

    def _steps(self, operation: OrderedOperation) -> Any:
        """Run an operation. Returns an error that concerns this group alone; raises others."""
        try:
            yield from self._runner.run(operation.call, operation.number, operation.has_arrived)
        except MismatchError as error:
            return error
        except HorovodInternalError:
            raise
        except Exception as error:
            if operation.call.steps is None:
                raise
            return error  # of a codec
        return None

    def _ended(self, operation: OrderedOperation, error: Exception | None) -> None:
        """End the operations that are through, in their order, and begin the next ones; on the driver's thread."""
        if operation not in self._running:  # the group failed in this round
            return
        operation.is_through, operation.failure, over = True, error, []
        with self.lock:
            while self._queue and self._queue[0].is_through and self._queue[0].failure is None:
                over.append(self._queue.popleft())
            first = self._queue[0] if self._queue else None
        if monotonic() - operation.since < NEXT_PATIENCE_SECONDS:
            self._patience = NEXT_PATIENCE_SECONDS
        for each in over:
            del self._running[each]
            each.end(self._finish(each))
        if first is None:
            return
        if isinstance(first.failure, MismatchError):  # which all ranks find
            self.fail(first.failure)
        elif first.failure is not None:
            failure = HorovodInternalError(f"{first} on {self._engine.mailbox.me()}: {in_words(first.failure)}")
            failure.__cause__ = first.failure
            self.tell_failure(str(failure))
            self.fail(failure)
        else:
            self._driver.inbox.append(self._begin)

    def _finish(self, operation: OrderedOperation) -> HorovodInternalError | None:
        """Bring the result to its place. Return the error of that, which does not affect the other ranks."""
        try:
            operation.call.finished()
        except Exception as error:
            text = f"{operation}: the result could not be written to its destination: {in_words(error)}"
            failure = HorovodInternalError(text)
            failure.__cause__ = error
            return failure
        return None


def _share_memory(operation: OrderedOperation, others: Sequence[OrderedOperation]) -> bool:
    """True if an operation may use memory of one of the others."""
    in_use = [array for other in others for array in other.call.arrays]
    return any(np.may_share_memory(array, used) for array in operation.call.arrays for used in in_use)


def _again(error: HorovodInternalError) -> HorovodInternalError:
    """Return an error of the same class that says that an earlier call failed."""
    again = type(error).__new__(type(error), f"an earlier operation of this group failed: {error}")
    again.__dict__.update(error.__dict__)
    return again


def make_group(engine: Engine, members: Sequence[int], number: int, name: str, seconds: float) -> OrderedGroup:
    """Return a group of the ranks ``members``; see Engine.ordered_group."""
    group = Group(engine.transport, members, engine.groups.choice)
    spin_seconds = engine.groups.pass_spin_seconds
    group.layout = layout_of(group, ordered_segment(number), spin_seconds)
    turns = turns_of(group)
    runner: Runner = NetworkRunner(group, number)
    if turns is not None:
        from hvdkit.transports.node.transport import NodeTransport

        assert isinstance(engine.transport, NodeTransport)
        runner = NodeRunner(group, number, turns, engine.transport.arenas_of(group.members))
    return OrderedGroup(engine, group, runner, number, name, seconds, spin_seconds > 0.0)
