"""A world in virtual time for ``launch/elastic/membership``: hosts, processes and messages, with their own truth."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from hvdkit.launch.elastic.actions import Action, Dismiss, EndJob, Form, Interrupt, Kill, Limits, Start
from hvdkit.launch.elastic.membership import Membership

MESSAGE_SECONDS = 0.3  # the longest way of a message
NOTICING_SECONDS = 2.0  # the longest time until a member notices that another one is lost
PATIENCE_SECONDS = 60.0  # for an answer, where the job can give one


@dataclass
class Ticketed:
    """The place of a process in a generation."""

    generation: int
    workers: tuple[int, ...]
    needs_sync: bool


@dataclass
class Proc:
    """A process, as it truly is."""

    number: int
    host: str
    slot: int
    is_alive: bool = True
    is_stopped: bool = False
    steps: int | None = None  # of its state
    ticket: Ticketed | None = None
    is_training: bool = False  # in the generation of its ticket, connected and with the state
    asked_at: float | None = None  # since when it waits for an answer
    is_dismissed: bool = False
    is_interrupted: bool = False


@dataclass
class Plan:
    """The faults of a run, and its length."""

    steps: int = 30
    load_seconds: tuple[float, float] = (0.5, 4.0)
    unreachable: set[str] = field(default_factory=set)  # hosts whose processes nobody can connect
    fails_at_step: int | None = None
    fails_while_loading: Callable[[Proc], bool] = lambda process: False
    hangs_while_loading: Callable[[Proc], bool] = lambda process: False


class World:
    """All that happens, in the order of its time."""

    def __init__(self, seed: int, limits: Limits, hosts: dict[str, int], plan: Plan) -> None:
        self.random, self.limits, self.plan = random.Random(seed), limits, plan
        self.machine = Membership(limits)
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._arrivals: dict[tuple[int, bool], float] = {}  # of the last message to and from each process
        self.processes: dict[int, Proc] = {}
        self.hosts = dict(hosts)  # that discovery finds
        self.forms: list[Form] = []
        self.ticket: Ticketed | None = None  # of the newest generation
        self.form_times: list[float] = []
        self.causes = 1  # for generations: ends of processes, newcomers that are ready, hosts that change
        self.reason: str | None = None
        self.killed_reasons: dict[int, str] = {}
        self.ends: dict[int, bool] = {}  # of processes: True for exit status 0
        self.harmed: set[int] = set()  # processes that a fault of the plan has hit
        self.newest = -1  # steps of the newest state that any process ever had
        self.starts: list[Start] = []
        self._do(self.machine.hosts_found(0.0, hosts))

    # Time

    def at(self, seconds: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._order), call))

    def delay(self, longest: float = MESSAGE_SECONDS) -> float:
        return self.random.uniform(0.01, longest)

    def send(self, number: int, is_downwards: bool, call: Callable[[], None]) -> None:
        """Bring a message to a process, or from it: some time later, and behind earlier messages of that direction."""
        key = number, is_downwards
        arrival = max(self.now + self.delay(), self._arrivals.get(key, 0.0))
        self._arrivals[key] = arrival
        self.at(arrival - self.now, call)

    def run(self, until: Callable[[], bool] = lambda: False, seconds: float = math.inf) -> None:
        """Let time pass until the job has ended, the condition is true, or so many seconds have passed."""
        end, rounds = self.now + seconds, 0
        while self.reason is None and not until():
            rounds += 1
            assert rounds < 200_000, "time does not go on"
            wakes = self.machine.wakes_at()
            assert wakes > self.machine._now, "the machine wakes for nothing"
            due = self._events[0][0] if self._events else math.inf
            if min(wakes, due) >= end or min(wakes, due) == math.inf:
                self.now = max(self.now, end if end < math.inf else self.now)
                return
            if wakes <= due:
                self.now = max(self.now, wakes)
                self._do(self.machine.time_passed(self.now))
            else:
                self.now, _, call = heapq.heappop(self._events)
                call()
            self.check()

    # What must hold at any time

    def check(self) -> None:
        alive = [process for process in self.processes.values() if process.is_alive]
        places = [(process.host, process.slot) for process in alive]
        assert len(places) == len(set(places)), f"two processes in a slot: {places}"
        training = {process.ticket.generation for process in alive if process.is_training and process.ticket}
        assert len(training) <= 1, f"two generations train: {training}"
        if training and self.forms:
            assert training == {self.forms[-1].generation}
        if self.reason is None:
            longest = self.limits.seconds + PATIENCE_SECONDS
            for process in alive:
                waits = process.asked_at is not None and self.now - process.asked_at > longest
                if waits and not process.is_stopped:
                    assert not self._is_needed_yet(process), f"{process} has no answer"
        assert len(self.forms) <= self.causes, f"{len(self.forms)} generations for {self.causes} causes"

    def _is_needed_yet(self, process: Proc) -> bool:
        """True if the process should have been answered: it is no spare."""
        members = self.forms[-1].workers if self.forms else ()
        return process.number in members or len(members) < self.limits.most

    # The actions

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            assert self.reason is None, f"{action} after the end"
            if isinstance(action, Start):
                self._start(action)
            elif isinstance(action, Form):
                self._form(action)
            elif isinstance(action, Interrupt):
                for number in action.workers:
                    self.send(number, True, lambda process=self.processes[number]: self._interrupted(process))
            elif isinstance(action, Dismiss):
                self.processes[action.worker].is_dismissed = True
                self.send(action.worker, True, lambda process=self.processes[action.worker]: self._dismissed(process))
            elif isinstance(action, Kill):
                self.killed_reasons[action.worker] = action.reason
                self.send(action.worker, True, lambda process=self.processes[action.worker]: self.end(process, False))
            else:
                assert isinstance(action, EndJob)
                self.reason = action.reason

    def _start(self, action: Start) -> None:
        assert action.worker not in self.processes
        assert self.hosts.get(action.slot.host, 0) > action.slot.number, "a slot that is not there"
        self.starts.append(action)
        process = self.processes[action.worker] = Proc(action.worker, action.slot.host, action.slot.number)
        if self.plan.hangs_while_loading(process):
            return
        seconds = self.random.uniform(*self.plan.load_seconds)
        if self.plan.fails_while_loading(process):
            self.at(seconds, lambda: self.end(process, False))
        else:
            self.at(seconds, lambda: self.ask(process))

    def _form(self, form: Form) -> None:
        members = [self.processes[number] for number in form.workers]
        assert len(set(form.workers)) == len(form.workers)
        assert len(members) <= self.limits.most
        if not self.machine._is_finishing:
            assert len(members) >= self.limits.least
        for process in members:
            assert process.asked_at is not None or not process.is_alive, f"{process} has not asked"
        holders = [process for process in self.processes.values() if process.is_alive and process.steps is not None]
        waiting = [process for process in members if process.steps is not None]
        if self.newest >= 0:
            assert waiting, f"the state is lost, though {holders} have it"
            assert members[0].steps == max(process.steps or 0 for process in waiting), "rank 0 has an older state"
        states = {process.steps for process in members}
        assert form.needs_sync or (len(states) == 1 and None not in states)
        hosts = [process.host for process in members]
        assert [key for key, _ in itertools.groupby(hosts)] == list(dict.fromkeys(hosts)), "ranks of a host are apart"
        assert form.generation == len(self.forms) + 1
        self.forms.append(form)
        self.form_times.append(self.now)
        self.ticket = ticket = Ticketed(form.generation, form.workers, form.needs_sync)
        for process in members:
            self.send(process.number, True, lambda process=process: self._receive(process, ticket))

    # The processes

    def ask(self, process: Proc, failed: bool = False, lost: int | None = None) -> None:
        if not process.is_alive or process.is_stopped:
            return
        process.is_training, process.asked_at, process.is_interrupted = False, self.now, False
        if process.ticket is None:
            self.causes += 1
        steps = process.steps
        report = process.number, steps, failed, lost
        self.send(process.number, False, lambda: self._do_if_running(self.machine.asked, *report))

    def _do_if_running(self, event: Any, *values: Any) -> None:
        if self.reason is None:
            self._do(event(self.now, *values))

    def _receive(self, process: Proc, ticket: Ticketed) -> None:
        if not process.is_alive or process.is_stopped:
            return
        process.ticket, process.asked_at, process.is_interrupted = ticket, None, False
        members = [self.processes[number] for number in ticket.workers]
        if all(member.ticket is ticket for member in members):
            self.at(self.delay(1.0), lambda: self._connected(ticket))
        for member in members:
            if not member.is_alive or member.is_stopped:
                lost = member.number
                notice = partial(self._notice, process, ticket, lost)
                self.at(self.delay(NOTICING_SECONDS), notice)

    def _members(self, ticket: Ticketed) -> list[Proc]:
        return [self.processes[number] for number in ticket.workers]

    def _connected(self, ticket: Ticketed) -> None:
        members = self._members(ticket)
        if any(not member.is_alive or member.is_stopped or member.ticket is not ticket for member in members):
            return  # the others notice
        hosts = {member.host for member in members}
        if hosts & self.plan.unreachable and len(hosts) > 1:
            for member in members:
                is_there = member.host in self.plan.unreachable
                others = [each.number for each in members if (each.host in self.plan.unreachable) != is_there]
                lost = self.random.choice(others)
                self.at(self.delay(NOTICING_SECONDS), partial(self._notice, member, ticket, lost))
            return
        seconds = self.delay(2.0) if ticket.needs_sync else 0.01
        self.at(seconds, lambda: self._synchronised(ticket))

    def _is_whole(self, ticket: Ticketed) -> bool:
        members = self._members(ticket)
        return all(each.is_alive and not each.is_stopped and each.ticket is ticket for each in members) and all(
            each.asked_at is None for each in members
        )

    def _synchronised(self, ticket: Ticketed) -> None:
        if self._is_whole(ticket):
            members = self._members(ticket)
            for process in members:
                process.steps, process.is_training = members[0].steps or 0, True
            self.newest = max(self.newest, members[0].steps or 0)
            self._train(ticket)

    def _train(self, ticket: Ticketed) -> None:
        """Train a step, after some time."""
        self.at(self.random.uniform(0.05, 1.0), lambda: self._step(ticket))

    def _step(self, ticket: Ticketed) -> None:
        if not self._is_whole(ticket):
            return
        members = self._members(ticket)
        step = (members[0].steps or 0) + 1
        if step == self.plan.fails_at_step:
            self.end(self.random.choice(members), False)
            return
        for process in members:
            process.steps = step
        self.newest = max(self.newest, step)
        if step >= self.plan.steps:
            for process in members:
                process.is_training = False
                self.at(self.delay(), lambda process=process: self.end(process, True))
        elif any(process.is_interrupted for process in members):
            for process in members:
                self.ask(process)
        else:
            self._train(ticket)

    def _notice(self, process: Proc, ticket: Ticketed, lost: int | None) -> None:
        """Have a member notice that its generation is broken."""
        if process.ticket is ticket and process.asked_at is None and process.is_alive and not process.is_dismissed:
            holder = next(member for member in self._members(ticket) if member.is_alive)
            if process.is_training and process is not holder and process.steps and self.random.random() < 0.3:
                process.steps -= 1  # it has not applied the last step
            self.ask(process, failed=True, lost=lost)

    def _interrupted(self, process: Proc) -> None:
        process.is_interrupted = True

    def _dismissed(self, process: Proc) -> None:
        assert process.asked_at is not None or not process.is_alive
        process.asked_at = None
        if not process.is_stopped:
            self.at(self.delay(), lambda: self.end(process, True))

    # Faults

    def end(self, process: Proc, succeeded: bool) -> None:
        """End a process; the others of its generation notice, if it was training."""
        if not process.is_alive:
            return
        process.is_alive, process.is_training, process.asked_at = False, False, None
        self.ends[process.number] = succeeded
        self.causes += 1
        ended = process.number, succeeded
        self.send(process.number, False, lambda: self._do_if_running(self.machine.ended, *ended))
        if not succeeded:
            self._break(process)

    def _break(self, gone: Proc) -> None:
        """Have the other members of the newest generation notice that a member is gone."""
        ticket = self.ticket
        if ticket is not None and gone.number in ticket.workers:
            for member in self._members(ticket):
                lost = gone.number if gone.is_stopped else self.random.choice([None, gone.number])
                self.at(self.delay(NOTICING_SECONDS), partial(self._notice, member, ticket, lost))

    def kill(self, process: Proc) -> None:
        self.harmed.add(process.number)
        self.end(process, False)

    def stop(self, process: Proc) -> None:
        """Stop a process; the others call it lost."""
        if process.is_alive:
            self.harmed.add(process.number)
            process.is_stopped = True
            process.is_training = False
            self._break(process)

    def lose_host(self, host: str) -> None:
        """Lose a host. The launcher learns it some time later; what it has started there until then is dead too."""

        def tell() -> None:
            self._end_all_of(host)
            self._do_if_running(self.machine.host_lost, host)

        self._end_all_of(host)
        self.at(self.delay(), tell)

    def _end_all_of(self, host: str) -> None:
        for process in self.alive():
            if process.host == host:
                self.harmed.add(process.number)
                process.is_alive, process.is_training, process.asked_at = False, False, None
                self.ends[process.number] = False
                self.causes += 1
                self._break(process)

    def find(self, hosts: dict[str, int]) -> None:
        self.hosts = dict(hosts)
        self.causes += 2 + len(self.alive())
        self._do_if_running(self.machine.hosts_found, hosts)
        self.check()

    def warn(self, host: str) -> None:
        self.causes += 2 + len(self.alive())
        self._do_if_running(self.machine.host_leaves, host)

    # Looks

    def alive(self) -> list[Proc]:
        return [process for process in self.processes.values() if process.is_alive]

    def training(self) -> list[Proc]:
        return [process for process in self.alive() if process.is_training]

    def members(self) -> list[Proc]:
        return [self.processes[number] for number in self.forms[-1].workers] if self.forms else []

    def trains(self, size: int) -> Callable[[], bool]:
        return lambda: len(self.training()) == size == len(self.members())
