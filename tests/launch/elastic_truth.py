"""A simulation of an elastic job in virtual time: hosts, processes and messages, which hold the truth of their own.

A process does as ``hvd.elastic`` does: it loads, asks, enters a generation when its ticket arrives, receives the state
from rank 0, trains steps with all members, and asks again after an interrupt or a failure. Messages of a host keep
their order, and take a random time in both directions, so that they cross. ``Driver`` compares each action of the
state machine with the truth.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

LATENCY = 0.3  # the longest way of a message
NOTICE = 3.0  # the longest time until a member notices that its generation is broken
HANG_NOTICE = 4.0  # the same for a member that hangs
LOAD = 4.0  # the longest time for which a program loads


class State(Enum):
    """The truth about a process."""

    LOADING = 1
    WAITING = 2
    MEMBER = 3
    DEAD = 4


class Life(Enum):
    """The truth about a generation."""

    CONNECTING = 1
    TRAINING = 2
    BROKEN = 3
    OVER = 4  # its members ask again
    FINISHING = 5


@dataclass(eq=False)
class Host:
    """A host. ``is_cut``: the connection of the driver is gone, which the driver does not know yet."""

    name: str
    is_up: bool = True
    is_reachable: bool = True  # for the processes of other hosts
    is_cut: bool = False
    connection: int = 0
    sent_at: float = 0.0  # arrival of the last message at the driver
    told_at: float = 0.0  # arrival of the last message here


@dataclass(eq=False)
class Generation:
    """A generation, as its members live it."""

    number: int
    members: list[Process]
    needs_sync: bool
    newest: int
    life: Life = Life.CONNECTING
    entered: int = 0
    receivers: int = 0  # members that still lack the state
    deaths: int = 0  # of members, other than by their success, before it broke
    hangs: int = 0
    is_unconnected: bool = False  # it broke because a host is unreachable
    has_trained: bool = False


@dataclass(eq=False)
class Process:
    """A process. ``steps``: of its state, None if it has none. ``generation``: the last one whose ticket was sent."""

    number: int
    host: Host
    slot: int
    started_at: float
    state: State = State.LOADING
    steps: int | None = None
    generation: Generation | None = None
    has_entered: bool = False
    is_interrupted: bool = False
    is_hung: bool = False
    is_stubborn: bool = False  # does not end when it is dismissed
    resumed_at: float = -1e9
    succeeded: bool | None = None  # its end
    deferred: list[Callable[[], None]] = field(default_factory=list)

    @property
    def newness(self) -> int:
        """The steps of its state, -1 without a state."""
        return -1 if self.steps is None else self.steps


@dataclass
class Program:
    """The behaviour of the user's program."""

    steps: int | None = None  # after which it finishes, None: when the user says so
    fails_at: int | None = None  # a step at which a rank always fails
    raises: bool = False  # there, on all ranks, none of which ends
    fails_loading: bool = False
    never_asks: bool = False
    loads_for: Callable[[random.Random], float] = lambda choose: choose.uniform(0.3, LOAD)
    step_seconds: float = 1.0


class World:
    """The truth: hosts, processes and generations, and the events to come."""

    def __init__(self, seed: int, program: Program) -> None:
        self.random = random.Random(seed)
        self.program = program
        self.now = 0.0
        self.hosts: dict[str, Host] = {}
        self.processes: dict[int, Process] = {}
        self.generations: list[Generation] = []
        self.newest = -1  # steps of the newest state there ever was
        self.causes = 0  # that may make another generation necessary
        self.is_last_step = False  # the user wants the job to finish
        self.slowest_host: float = 8.0  # until the loss of a host is noticed
        self.tell: Callable[..., None] = lambda *values: None  # an event of the driver
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0

    # Time and messages

    def after(self, seconds: float, call: Callable[..., None], *values: Any) -> None:
        self._count += 1
        heapq.heappush(self._heap, (self.now + seconds, self._count, call, values))

    def next_at(self) -> float:
        return self._heap[0][0] if self._heap else float("inf")

    def next_event(self) -> None:
        self.now, _, call, values = heapq.heappop(self._heap)
        call(*values)

    def within(self, seconds: float) -> float:
        return self.random.random() * seconds

    def send(self, host: Host, event: str, *values: Any) -> None:
        """Send a message from a host to the driver."""
        if not host.is_cut:
            host.sent_at = max(host.sent_at, self.now + self.within(LATENCY))
            self.after(host.sent_at - self.now, self._arrive, host, host.connection, event, values)

    def _arrive(self, host: Host, connection: int, event: str, values: tuple[Any, ...]) -> None:
        if host.connection == connection and not host.is_cut:
            self.tell(event, *values)

    def order(self, host: Host, call: Callable[..., None], *values: Any) -> None:
        """Send a message from the driver to a host."""
        if not host.is_cut:
            host.told_at = max(host.told_at, self.now + self.within(LATENCY))
            self.after(host.told_at - self.now, self._obey, host, host.connection, call, values)

    def _obey(self, host: Host, connection: int, call: Callable[..., None], values: tuple[Any, ...]) -> None:
        if host.connection == connection and not host.is_cut:
            call(*values)

    # Processes

    def living(self) -> list[Process]:
        return [process for process in self.processes.values() if process.state != State.DEAD]

    def _does(self, process: Process, call: Callable[..., None], *values: Any) -> bool:
        """Return True if a process can act now; have one that hangs do it later."""
        if process.is_hung:
            process.deferred.append(lambda: call(*values))
        return process.state != State.DEAD and not process.is_hung

    def start(self, process: Process) -> None:
        """Carry out the order to start a process."""
        if not process.host.is_up:
            self._cut(process.host)
        elif process.state != State.DEAD:
            self.after(self.program.loads_for(self.random), self._loaded, process)

    def _loaded(self, process: Process) -> None:
        if self._does(process, self._loaded, process):
            if self.program.fails_loading or self.program.never_asks:
                self.die(process, succeeded=not self.program.fails_loading)
            else:
                self.causes += 1
                self._ask(process)

    def _ask(self, process: Process, failed: bool = False, lost: int | None = None) -> None:
        if process.state == State.DEAD or not self._does(process, self._ask, process, failed, lost):
            return
        if process.state != State.WAITING:
            process.state = State.WAITING
            self.send(process.host, "asked", process.number, process.steps, failed, lost)

    def die(self, process: Process, succeeded: bool = False) -> None:
        """End a process. Its death is a matter of all members of its generation."""
        if process.state == State.DEAD:
            return
        process.state, process.succeeded = State.DEAD, succeeded
        self.causes += 1
        self.send(process.host, "ended", process.number, succeeded)
        generation = process.generation
        if generation is not None and generation is self.generations[-1]:
            generation.deaths += not succeeded and generation.life != Life.BROKEN
            self._break(generation, process)

    def hang(self, process: Process) -> None:
        """Stop a process, as SIGSTOP does."""
        process.is_hung = True
        self.causes += 1
        generation = process.generation
        if generation is not None and process.state != State.WAITING:
            self.after(self.random.uniform(2.0, HANG_NOTICE), self._miss, generation, process)

    def resume(self, process: Process) -> None:
        """Have a stopped process go on."""
        if process.is_hung:
            process.is_hung, process.resumed_at = False, self.now
            deferred, process.deferred = process.deferred, []
            for call in deferred:
                call()

    def _miss(self, generation: Generation, process: Process) -> None:
        if process.is_hung or process.state == State.DEAD:
            generation.hangs += 1
            self._break(generation, process)

    def interrupt(self, process: Process, gone: list[Process]) -> None:
        """Carry out an interrupt, which a process reads at its next commit; while it waits for a ticket it does not.

        Where it still connects, it does not wait for members that are ``gone``.
        """
        generation = process.generation
        if self._does(process, self.interrupt, process, gone) and process.state == State.MEMBER:
            process.is_interrupted = True
            if gone and generation is not None and not generation.has_trained and generation.life == Life.BROKEN:
                self._notice(process, generation, gone[0])

    def dismiss(self, process: Process) -> None:
        if process.state == State.DEAD or not self._does(process, self.dismiss, process):
            return
        assert process.state == State.WAITING, "a process is dismissed that does not wait"
        if not process.is_stubborn:
            self.after(self.within(1.0), self.die, process, True)

    # Generations

    def form(self, generation: Generation) -> None:
        """Note that the tickets of a generation were sent."""
        self.generations.append(generation)
        for process in generation.members:
            process.generation, process.has_entered = generation, False
            if process.state == State.DEAD or process.is_hung:
                self.after(self.random.uniform(2.0, HANG_NOTICE), self._miss, generation, process)

    def enter(self, process: Process, generation: Generation) -> None:
        """Have a process read its ticket."""
        if process.state == State.DEAD or not self._does(process, self.enter, process, generation):
            return
        assert process.state == State.WAITING, "a ticket for a process that does not wait"
        assert generation is self.generations[-1], "a ticket of a generation that is over"
        process.state, process.has_entered, process.is_interrupted = State.MEMBER, True, False
        generation.entered += 1
        if generation.life == Life.BROKEN:
            self.after(self.within(NOTICE), self._notice, process, generation, None)
        elif generation.entered == len(generation.members):
            self.after(self.within(0.5), self._connect, generation)

    def _connect(self, generation: Generation) -> None:
        if generation.life != Life.CONNECTING:
            return
        if any(process.is_hung for process in generation.members):  # it will be missed, or goes on
            self.after(0.5, self._connect, generation)
            return
        hosts = {process.host for process in generation.members}
        if len(hosts) > 1 and not all(host.is_reachable for host in hosts):
            generation.is_unconnected = True
            self.causes += 1
            unreachable = [process for process in generation.members if not process.host.is_reachable]
            self._break(generation, unreachable[0] if self.random.random() < 0.3 else None)
            return
        if generation.needs_sync:
            newest = max(0, generation.members[0].newness)
            generation.receivers = len(generation.members)
            for process in generation.members:
                self.after(self.within(1.0), self._receive, process, generation, newest)
        else:
            self._train(generation)

    def _receive(self, process: Process, generation: Generation, steps: int) -> None:
        if self._does(process, self._receive, process, generation, steps) and generation.life == Life.CONNECTING:
            process.steps = steps
            self.newest = max(self.newest, steps)
            generation.receivers -= 1
            if not generation.receivers:
                self._train(generation)

    def _train(self, generation: Generation) -> None:
        generation.life, generation.has_trained = Life.TRAINING, True
        self.after(self.program.step_seconds * self.random.uniform(0.3, 1.0), self._step, generation)

    def _step(self, generation: Generation) -> None:
        members = generation.members
        if generation.life != Life.TRAINING:
            return
        if any(process.is_hung for process in members):
            self.after(0.5, self._step, generation)
            return
        assert generation is self.generations[-1], "an old generation trains"
        assert all(process.state == State.MEMBER and process.generation is generation for process in members)
        steps = members[0].steps
        assert steps is not None
        assert {process.steps for process in members} == {steps}, "members train different states"
        if steps == self.program.fails_at and self.program.raises:
            self.causes += 1
            self._break(generation, None)
            return
        if steps == self.program.fails_at:
            self.die(self.random.choice(members))
            return
        for process in members:
            process.steps = steps + 1
        self.newest = max(self.newest, steps + 1)
        if self._is_finished(steps + 1):
            generation.life = Life.FINISHING
            for process in members:
                self.after(self.within(LATENCY), self._finish, process)
        elif any(process.is_interrupted for process in members):
            generation.life = Life.OVER
            for process in members:
                self.after(self.within(0.1), self._ask, process)
        else:
            self._train(generation)

    def _is_finished(self, steps: int) -> bool:
        return self.is_last_step or (self.program.steps is not None and steps >= self.program.steps)

    def _finish(self, process: Process) -> None:
        if self._does(process, self._finish, process) and process.state == State.MEMBER:
            self.die(process, succeeded=True)

    def _break(self, generation: Generation, lost: Process | None) -> None:
        """Break a generation: its members notice one after the other, and some have not applied the last step."""
        if generation.life not in (Life.CONNECTING, Life.TRAINING):
            return
        half_done = generation.life == Life.TRAINING and self.random.random() < 0.5
        half_done &= generation.members[0].steps != self.program.fails_at
        generation.life = Life.BROKEN
        for process in generation.members:
            if process.state != State.MEMBER:
                continue
            if half_done and self.random.random() < 0.5 and not process.is_hung:
                assert process.steps is not None
                process.steps += 1
                self.newest = max(self.newest, process.steps)
            self.after(self.within(NOTICE), self._notice, process, generation, lost)

    def _notice(self, process: Process, generation: Generation, lost: Process | None) -> None:
        if process.state != State.MEMBER or process.generation is not generation:
            return
        if not self._does(process, self._notice, process, generation, lost):
            return
        if process.steps is not None and self._is_finished(process.steps) and process.steps > generation.newest:
            self._finish(process)
            return
        names: list[int | None] = [None]
        if lost is not None and lost is not process:
            names += [lost.number] * 2
        others = [other for other in generation.members if other is not process and not other.is_hung]
        # Another member may have left before, since it had noticed the loss.
        if others and not generation.is_unconnected and self.random.random() < 0.1:
            names = [self.random.choice(others).number]
        self._ask(process, failed=True, lost=self.random.choice(names))

    # Hosts

    def lose_host(self, host: Host, is_up: bool) -> None:
        """Lose a host with all its processes; the driver learns of it later."""
        host.is_up = is_up
        if not host.is_cut:
            self._cut(host)

    def _cut(self, host: Host) -> None:
        self.causes += 1
        host.is_cut = True
        for process in self.living():
            if process.host is host:
                self.die(process)
        self.after(self.random.uniform(0.2, self.slowest_host), self._report, host)

    def _report(self, host: Host) -> None:
        host.is_cut, host.connection = False, host.connection + 1
        host.sent_at = host.told_at = self.now
        for process in self.living():  # started over the dead connection
            if process.host is host:
                process.state, process.succeeded = State.DEAD, False
        self.tell("host_lost", host.name)
