"""Decisions on the members of an elastic job: a state machine without a clock, a socket or a process.

The driver tells it each event with the time, and carries out the actions that it returns. A process is started, loads
its program, and asks to be in the next generation; it waits until it is answered, by a generation or by its dismissal.
Then it is a member until it asks again, or ends. A generation begins when every member of the one before has asked or
ended, so that there is one at a time. Members ask after a failure, or when they were interrupted because others are
ready to join or some must leave. The state of a job is its parameters; a process says how many steps its state has
seen when it asks, and the job ends if no process has the state.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

from hvdkit.launch.elastic.actions import Action, Dismiss, EndJob, Form, Interrupt, Kill, Limits, Start
from hvdkit.launch.elastic.slots import ProcessSlot, Slots
from hvdkit.launch.elastic.workers import ElasticWorker, Phase, choose_members

FAILURES_AT_A_STEP = 3  # end the job
MOST_ATTEMPTS = 10  # to connect new processes, without a step between, that do not count as failures
BLAMED_SECONDS = 5.0  # until a member is killed that another one called lost, if it does not ask
GATHERING_SECONDS = 5.0  # for which a process that is ready waits for others that load their program
ENDING_SECONDS = 30.0  # until a process is killed that was dismissed


class Membership:
    """The processes of a job, and all that decides which of them are its members."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._slots = Slots(limits.cooldown)
        self._closing: set[str] = set()  # hosts that will be taken away
        self._workers: dict[int, ElasticWorker] = {}  # all that live
        self._started = self._generation = self._failed_starts = 0  # the last: before any process asked
        self._has_asked = self._has_trained = False  # any process, at any time; with a state
        self._ends: dict[int, bool] = {}  # of the members of the last generation: True for success
        self._is_finishing = self._is_over = False  # a member has succeeded; the job has ended
        self._short_since: float | None = None  # since when there is no generation
        # Since the generation began:
        self._steps = -1  # of the newest state, when it began
        self._is_interrupted = self._is_broken = self._has_failed = False
        self._is_examined = self._is_unconnected = False
        self._blames: Counter[int] = Counter()  # how often each process was called lost
        self._failed_steps, self._failures, self._attempts = -1, 0, 0  # in turn, without a step between
        self._now = 0.0
        self._actions: list[Action] = []

    def hosts_found(self, now: float, hosts: Mapping[str, int]) -> list[Action]:
        """Note the hosts that there are, with their slots. The processes of other hosts must leave."""
        self._closing &= hosts.keys()
        self._slots.found(hosts)
        return self._decide(now)

    def host_leaves(self, now: float, host: str) -> list[Action]:
        """Note that a host will be taken away: its processes must leave, and nothing is started there."""
        self._closing.add(host)
        return self._decide(now)

    def host_lost(self, now: float, host: str) -> list[Action]:
        """Note that a host is lost, and that all its processes are dead."""
        self._slots.lose_host(host, now)
        for worker in [worker for worker in self._workers.values() if worker.slot.host == host]:
            self._remove(now, worker, succeeded=False, is_slot_at_fault=False)
        return self._decide(now)

    def asked(
        self, now: float, number: int, steps: int | None = None, failed: bool = False, lost: int | None = None
    ) -> list[Action]:
        """Note that a process wants to be in the next generation.

        ``steps``: the steps that its state has seen, None if it has no state. ``failed``: it asks after an error, which
        called the process ``lost`` lost.
        """
        worker = self._workers.get(number)
        if worker is not None and worker.phase != Phase.ENDING and not worker.is_killed:
            worker.phase, worker.since, worker.steps, worker.kill_at = Phase.WAITING, now, steps, math.inf
            self._has_asked = True
            self._has_trained |= steps is not None
            self._is_broken |= failed and worker.generation == self._generation > 0
            self._blames.update([] if lost is None else [lost])
            blamed = None if lost is None else self._workers.get(lost)
            if blamed is not None and blamed.phase == Phase.MEMBER:
                blamed.kill_at = min(blamed.kill_at, now + BLAMED_SECONDS)
        return self._decide(now)

    def ended(self, now: float, number: int, succeeded: bool) -> list[Action]:
        """Note the end of a process."""
        if (worker := self._workers.get(number)) is not None:
            self._remove(now, worker, succeeded, is_slot_at_fault=True)
        return self._decide(now)

    def time_passed(self, now: float) -> list[Action]:
        """Act on the time; the driver calls this when ``wakes_at`` has come."""
        return self._decide(now)

    def wakes_at(self) -> float:
        """Return the next time at which something is due, infinity if only an event can change anything."""
        times = [self._slots.next_opening(self._now), *(self._kills_at(worker) for worker in self._workers.values())]
        times += [worker.since + GATHERING_SECONDS for worker in self._in(Phase.WAITING)]
        if self._short_since is not None:
            times.append(self._short_since + self._limits.seconds)
        return math.inf if self._is_over else min((time for time in times if time > self._now), default=math.inf)

    def _decide(self, now: float) -> list[Action]:
        self._now, self._actions = now, []
        for worker in self._workers.values():
            worker.must_leave = worker.slot.host in self._closing or not self._slots.exists(worker.slot)
        if not self._is_over and not self._in(Phase.MEMBER):
            self._form()
        if not self._is_over:
            self._dismiss()
            self._interrupt()
            self._kill()
            self._start()
        return self._actions

    def _in(self, *phases: Phase) -> list[ElasticWorker]:
        return [worker for worker in self._workers.values() if worker.phase in phases]

    def _remove(self, now: float, worker: ElasticWorker, succeeded: bool, is_slot_at_fault: bool) -> None:
        """Remove a process that has ended, and note its success or failure."""
        del self._workers[worker.number]
        has_finished = succeeded and worker.phase != Phase.WAITING
        if worker.phase == Phase.ENDING:
            return
        self._failed_starts += not self._has_asked and not has_finished
        if worker.generation or not self._generation:  # it was a member, or the program never asks
            self._ends[worker.number] = has_finished
            self._is_finishing |= has_finished
            self._has_failed |= bool(worker.generation) and not has_finished
        elif has_finished:
            has_finished = False  # it ends before it has done anything
        if is_slot_at_fault and not has_finished:
            self._slots.fail(worker.slot, now)

    def _form(self) -> None:
        """Begin a generation, or end the job, if it is time."""
        former = [worker for worker in self._in(Phase.WAITING) if worker.generation]
        if self._generation == 0:
            may_go_on = bool(self._in(Phase.WAITING, Phase.STARTING))
        else:
            may_go_on = any(worker.steps is not None or not self._has_trained for worker in former)
        if self._is_finishing and not may_go_on:
            self._end("" if all(self._ends.values()) else "a rank failed while others finished")
        elif self._generation and not may_go_on:
            self._end("no rank with the state of the job is left")
        elif self._failed_starts >= FAILURES_AT_A_STEP and not self._has_asked:
            self._end(f"{self._failed_starts} processes failed before any of them was ready")
        else:
            self._short_since = self._now if self._short_since is None else self._short_since
            if self._is_broken and not self._is_examined:
                self._is_examined = True
                self._examine(former)
            self._form_of(self._in(Phase.WAITING))

    def _examine(self, former: list[ElasticWorker]) -> None:
        """Find the reason if a generation broke at once though no member ended: they could not connect."""
        if self._has_failed or max((worker.newness for worker in former), default=-1) > self._steps:
            return
        new = [worker for worker in former if worker.steps is None]
        if self._has_trained and new:
            most = max(self._blames[worker.number] for worker in new)  # zero if nobody could tell
            for worker in (worker for worker in new if self._blames[worker.number] == most):
                self._slots.fail(worker.slot, self._now)
                self._kill_now(worker, "it could not connect to the others")
        self._attempts += 1
        if not (self._has_trained and new) or self._attempts > MOST_ATTEMPTS:
            self._has_failed = self._is_unconnected = True

    def _form_of(self, waiting: list[ElasticWorker]) -> None:
        """Begin a generation if enough processes wait, or end the job if they waited too long."""
        assert self._short_since is not None
        if self._is_finishing and self._generation:
            waiting = [worker for worker in waiting if worker.generation]
        least = 1 if self._is_finishing else self._limits.least
        is_late = self._now >= self._short_since + self._limits.seconds
        enough = least if self._generation or is_late or self._is_finishing else self._limits.start
        staying = [worker for worker in waiting if worker.generation and not worker.must_leave]
        needs_holder = self._has_trained and all(worker.steps is None for worker in staying)
        chosen = choose_members(waiting, least, self._limits.most, self._slots, needs_holder)
        if len(chosen) >= enough:
            self._begin(chosen)
        elif is_late:
            self._end(f"only {len(chosen)} of at least {least} ranks for {self._limits.seconds:g} s")
        elif not self._can_grow() and len(chosen) < least:
            self._end(f"only {len(chosen)} of at least {least} ranks, and no slot in which another may be started")

    def _can_grow(self) -> bool:
        """True if another process may become ready."""
        will_open = self._slots.next_opening(self._now) < math.inf or bool(self._openings())
        coming = self._in(Phase.STARTING, Phase.ENDING)
        return bool(coming) or self._limits.hosts_may_change or (will_open and not self._is_finishing)

    def _begin(self, chosen: list[ElasticWorker]) -> None:
        """Begin a generation, unless failures repeat themselves."""
        newest = max(worker.newness for worker in chosen)
        if self._has_failed:
            self._failures = self._failures + 1 if newest == self._failed_steps else 1
            self._failed_steps = newest
            if self._failures >= FAILURES_AT_A_STEP:
                when = f"after step {newest}" if newest >= 0 else "before the first step"
                fault = "the ranks cannot connect" if self._is_unconnected else "the data or the program is at fault"
                self._end(f"{self._failures} failures {when}: {fault}")
                return
        if self._limits.resets is not None and self._generation > self._limits.resets:
            self._end(f"reset count {self._generation - 1} has exceeded limit {self._limits.resets}")
            return
        needs_sync = self._has_failed or self._is_broken or any(worker.steps != newest for worker in chosen)
        self._generation += 1
        self._attempts = 0 if newest > self._steps else self._attempts
        self._actions.append(Form(self._generation, tuple(worker.number for worker in chosen), needs_sync))
        for worker in chosen:
            if worker.steps is not None:
                self._slots.succeed(worker.slot, self._now)
            worker.phase, worker.since, worker.generation = Phase.MEMBER, self._now, self._generation
        self._steps, self._short_since, self._ends, self._blames = newest, None, {}, Counter()
        self._is_interrupted = self._is_broken = self._has_failed = False
        self._is_examined = self._is_unconnected = False

    def _asked_again(self) -> list[ElasticWorker]:
        """Return the members of the present generation that have asked."""
        return [worker for worker in self._in(Phase.WAITING) if worker.generation == self._generation > 0]

    def _dismiss(self) -> None:
        """Dismiss processes that wait in vain: they must leave, or the job finishes."""
        if not self._in(Phase.MEMBER):
            return
        for worker in self._in(Phase.WAITING):
            if (worker.must_leave or self._is_finishing) and worker.generation != self._generation:
                worker.phase, worker.since = Phase.ENDING, self._now
                self._actions.append(Dismiss(worker.number))

    def _interrupt(self) -> None:
        """Have the members ask if another one has asked, others are ready to join, or some can leave."""
        members = self._in(Phase.MEMBER)
        if not members or self._is_interrupted:
            return
        if self._asked_again() or (not self._is_finishing and self._would_change(members)):
            self._is_interrupted = True
            self._actions.append(Interrupt(tuple(worker.number for worker in members)))

    def _would_change(self, members: list[ElasticWorker]) -> bool:
        """True if a generation that began now had other members, who are assumed to have the state by then."""
        ready = [worker for worker in self._in(Phase.WAITING) if not worker.must_leave]
        gathered_at = min((worker.since + GATHERING_SECONDS for worker in ready), default=math.inf)
        gathers = self._in(Phase.STARTING) and self._now < gathered_at
        needs_holder = all(worker.must_leave for worker in members)
        waiting = members if gathers else [*members, *ready]
        chosen = choose_members(waiting, max(1, self._limits.least), self._limits.most, self._slots, needs_holder)
        return {worker.number for worker in chosen} != {worker.number for worker in members}

    def _kills_at(self, worker: ElasticWorker) -> float:
        """Return when a process is to be killed."""
        if worker.is_killed:
            return math.inf
        if worker.phase == Phase.ENDING:
            return worker.since + ENDING_SECONDS
        if worker.phase == Phase.STARTING:
            return worker.since + self._limits.seconds
        others = self._asked_again()
        if worker.phase == Phase.MEMBER and others and not self._is_finishing:
            return min(worker.kill_at, min(other.since for other in others) + self._limits.seconds)
        return worker.kill_at

    def _kill(self) -> None:
        """Kill processes whose time is over."""
        for worker in list(self._workers.values()):
            if self._now < self._kills_at(worker):
                continue
            if worker.phase == Phase.STARTING:
                self._slots.fail(worker.slot, self._now)
                self._kill_now(worker, f"it was not ready within {self._limits.seconds:g} s")
            else:
                worker.is_killed = True
                how = "others lost it, and it does not ask" if worker.phase == Phase.MEMBER else "it was dismissed"
                self._actions.append(Kill(worker.number, how))

    def _kill_now(self, worker: ElasticWorker, reason: str) -> None:
        worker.phase, worker.is_killed = Phase.ENDING, True
        self._actions.append(Kill(worker.number, reason))

    def _openings(self) -> list[ProcessSlot]:
        taken = {worker.slot for worker in self._workers.values()}
        return [slot for slot in self._slots.open(self._now, taken) if slot.host not in self._closing]

    def _start(self) -> None:
        """Start processes in open slots, as many as are wanted."""
        wanted = self._limits.most if self._generation else self._limits.start
        present = self._in(Phase.STARTING, Phase.WAITING, Phase.MEMBER)
        missing = 0 if self._is_finishing else wanted - sum(not worker.must_leave for worker in present)
        for slot in self._openings()[: max(0, missing)]:
            self._workers[self._started] = ElasticWorker(self._started, slot, self._now)
            self._actions.append(Start(self._started, slot))
            self._started += 1

    def _end(self, reason: str) -> None:
        self._is_over = True
        self._actions.append(EndJob(reason))
