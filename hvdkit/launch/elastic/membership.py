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

from hvdkit.launch.elastic.actions import Action, Announce, Dismiss, EndJob, Form, Interrupt, Kill, Limits, Start
from hvdkit.launch.elastic.newcomers import Newcomers
from hvdkit.launch.elastic.slots import FAILURE_SECONDS, ProcessSlot, Slots
from hvdkit.launch.elastic.workers import ElasticWorker, Phase, choose_members, newest_of

FAILURES_AT_A_STEP = 3  # end the job
PROGRAM_FAULT = "the data or the program is at fault"
CONNECTION_FAULT = "the ranks cannot connect, or the program is at fault"  # no process ended
BLAMED_SECONDS = 5.0  # until a member is killed that another one called lost, if it does not ask
GATHERING_SECONDS = 5.0  # for which a process that is ready waits for others that load their program


class Membership:
    """The processes of a job, and all that decides which of them are its members."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._slots, self._newcomers = Slots(limits.cooldown), Newcomers(limits.least)
        self._workers: dict[int, ElasticWorker] = {}  # all that live
        self._started = self._generation = self._failed_starts = 0  # the last: before any process asked
        self._has_asked = self._has_trained = False  # any process, at any time; with a state
        self._ends: dict[int, bool] = {}  # of the members of the last generation: True for success
        self._is_finishing = self._is_over = False  # a member has succeeded; the job has ended
        self._short_since: float | None = None  # since when there is no generation
        self._steps = -1  # of the newest state, when the generation began; since then:
        self._is_interrupted = self._is_broken = self._is_examined = False
        self._gone: list[int] = []  # members that failed, of which the others were not told yet
        self._fault = ""  # the reason of a failure
        self._blames: Counter[int] = Counter()  # how often each process was called lost
        self._failed_steps, self._failures = -1, 0  # how often in turn members failed in the same step
        self._now, self._actions = 0.0, list[Action]()

    def hosts_found(self, now: float, hosts: Mapping[str, int]) -> list[Action]:
        """Note the hosts that there are, with their slots. The processes of other hosts must leave."""
        self._slots.found(hosts)
        return self._decide(now)

    def host_leaves(self, now: float, host: str) -> list[Action]:
        """Note that a host will be taken away: its processes must leave, and nothing is started there."""
        self._slots.leave(host)
        return self._decide(now)

    def host_lost(self, now: float, host: str) -> list[Action]:
        """Note that a host is lost, and that all its processes are dead."""
        for worker in [worker for worker in self._workers.values() if worker.slot.host == host]:
            self._remove(now, worker, succeeded=False, is_slot_at_fault=False)
        self._slots.lose_host(host, now)
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
            if failed and worker.generation == self._generation > 0 and not self._is_broken:
                self._is_broken = True
                self._gone.append(number)  # the others learn of later ones from each other
            blamed = None if lost is None else self._workers.get(lost)
            if blamed is not None and blamed.phase == Phase.MEMBER:  # else others only saw that it gave up before
                self._blames[blamed.number] += 1
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
            is_alone = worker.generation > 0 and self._limits.most == 1  # it cannot hand its state over
            worker.must_leave = not self._slots.exists(worker.slot) and not is_alone
        if not self._is_over and self._limits.rescues and self._slots.all_leave():
            self._end("all hosts leave")
        if not self._is_over and not self._in(Phase.MEMBER):
            self._form()
        if not self._is_over:
            self._dismiss()
            self._kill()
            self._interrupt()
            self._start()
        self._actions[:0] = map(Announce, self._slots.news)
        self._slots.news.clear()
        return self._actions

    def _in(self, *phases: Phase) -> list[ElasticWorker]:
        return [worker for worker in self._workers.values() if worker.phase in phases]

    def _remove(self, now: float, worker: ElasticWorker, succeeded: bool, is_slot_at_fault: bool) -> None:
        """Remove a process that has ended, and note its success or failure."""
        del self._workers[worker.number]
        if worker.phase == Phase.ENDING:
            return
        has_finished = succeeded and worker.phase != Phase.WAITING
        self._gone += [] if succeeded or worker.phase != Phase.MEMBER else [worker.number]
        if worker.phase == Phase.MEMBER and now - worker.since >= FAILURE_SECONDS:
            self._slots.succeed(worker.slot, now)
        if has_finished and worker.must_leave:  # because of that, or at the end of the program: the others tell
            self._ends |= {worker.number: True} if worker.generation else {}
            return
        self._failed_starts += is_slot_at_fault and not self._has_asked and not has_finished
        if worker.generation or not self._generation:  # it was a member, or the program never asks
            self._ends[worker.number] = has_finished
            self._is_finishing |= has_finished
            self._fault = PROGRAM_FAULT if worker.generation and not has_finished else self._fault
        else:
            has_finished = False  # it ended before it had done anything
        if is_slot_at_fault and not has_finished:
            self._slots.fail(worker.slot, now)

    def _form(self) -> None:
        """Begin a generation, or end the job, if it is time."""
        former = [worker for worker in self._in(Phase.WAITING) if worker.generation]
        may_go_on = any(worker.steps is not None or not self._has_trained for worker in former)
        if self._generation == 0:
            may_go_on = bool(self._in(Phase.WAITING, Phase.STARTING))
        have_succeeded = bool(self._ends) and all(self._ends.values())
        have_left = bool(self._generation) and have_succeeded and not former  # all had to leave, when they finished
        if not may_go_on and (self._is_finishing or have_left):
            self._end("" if have_succeeded else "a rank failed while others finished")
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
        """Find a reason if a generation broke at once though no member ended: they could not connect."""
        if self._ends or newest_of(former) > self._steps:
            return
        causes = self._newcomers.find_causes(former, self._has_trained, self._blames)
        self._fault = CONNECTION_FAULT if causes == [] else ""  # None: they join host by host
        for worker in causes or []:
            self._kill_at_fault(worker, "it could not connect to the others")

    def _form_of(self, waiting: list[ElasticWorker]) -> None:
        """Begin a generation if enough processes wait, or end the job if they waited too long."""
        assert self._short_since is not None
        if self._is_finishing and self._generation:
            waiting = [worker for worker in waiting if worker.generation]
        least = 1 if self._is_finishing else self._limits.least
        is_late = self._now >= self._short_since + self._limits.seconds
        is_enough = self._generation or is_late or self._is_finishing or not self._can_grow()
        enough = least if is_enough else self._limits.start
        waiting = self._newcomers.select(waiting, least, self._has_trained)
        chosen = choose_members(waiting, least, self._limits.most, self._slots)
        if len(chosen) >= enough:
            self._begin(chosen)
        elif is_late:
            self._end(f"only {len(chosen)} of at least {least} ranks for {self._limits.seconds:g} s")
        elif not self._can_grow():
            self._end(f"only {len(chosen)} of at least {least} ranks, and no slot in which another rank may be started")

    def _can_grow(self) -> bool:
        """True if another process may become ready."""
        will_open = not self._is_finishing and (self._slots.next_opening(self._now) < math.inf or self._openings())
        return bool(will_open or self._limits.hosts_may_change or self._in(Phase.STARTING, Phase.ENDING))

    def _begin(self, chosen: list[ElasticWorker]) -> None:
        """Begin a generation, unless failures repeat themselves."""
        newest = newest_of(chosen)
        if self._fault:
            self._failures = self._failures + 1 if newest == self._failed_steps else 1
            self._failed_steps = newest
            if self._failures >= FAILURES_AT_A_STEP:
                when = f"after step {newest}" if newest >= 0 else "before the first step"
                self._end(f"{self._failures} failures {when}: {self._fault}")
                return
        if self._limits.resets is not None and self._generation > self._limits.resets:
            self._end(f"reset count {self._generation - 1} has exceeded limit {self._limits.resets}")
            return
        needs_sync = bool(self._fault) or self._is_broken or any(worker.steps != newest for worker in chosen)
        self._generation += 1
        self._actions.append(Form(self._generation, tuple(worker.number for worker in chosen), needs_sync))
        for worker in chosen:
            if worker.steps is not None:
                self._slots.succeed(worker.slot, self._now)
            worker.phase, worker.since, worker.generation = Phase.MEMBER, self._now, self._generation
        self._steps, self._short_since, self._ends, self._blames = newest, None, {}, Counter()
        self._is_interrupted = self._is_broken = self._is_examined = False
        self._gone, self._fault = [], ""

    def _asked_again(self) -> list[ElasticWorker]:
        """Return the members of the present generation that have asked."""
        return [worker for worker in self._in(Phase.WAITING) if worker.generation == self._generation > 0]

    def _dismiss(self) -> None:
        """Dismiss processes that wait in vain: they must leave, are too many, or the job finishes."""
        members = [*self._in(Phase.MEMBER), *self._asked_again()]
        room = self._limits.most - sum(not worker.must_leave for worker in members)
        for worker in self._in(Phase.WAITING) if self._in(Phase.MEMBER) else []:
            if worker.generation == self._generation:
                continue
            if worker.must_leave or self._is_finishing or room <= 0:
                worker.phase, worker.since = Phase.ENDING, self._now
                self._actions.append(Dismiss(worker.number))
            room -= not worker.must_leave

    def _interrupt(self) -> None:
        """Have the members ask if another one has asked or failed, others are ready to join, or some can leave."""
        members = self._in(Phase.MEMBER)
        changes = not self._is_finishing and (self._can_join() or self._can_leave(members))
        has_reason = not self._is_interrupted and (changes or self._asked_again())
        if members and (has_reason or self._gone):
            self._is_interrupted = True
            self._actions.append(Interrupt(tuple(worker.number for worker in members), tuple(self._gone)))
            self._gone = []

    def _can_join(self) -> bool:
        """True if processes are ready for which there is room, since others were dismissed."""
        ready = [worker.since for worker in self._in(Phase.WAITING) if not worker.must_leave]
        loading = [worker for worker in self._in(Phase.STARTING) if not worker.must_leave]
        return bool(ready) and (not loading or self._now >= min(ready) + GATHERING_SECONDS)

    def _can_leave(self, members: list[ElasticWorker]) -> bool:
        staying = sum(not worker.must_leave for worker in members)
        return max(self._limits.least, 1) <= staying < len(members)

    def _kills_at(self, worker: ElasticWorker) -> float:
        """Return when a process is to be killed."""
        others = [] if self._is_finishing else self._asked_again()
        missed_since = min((other.since for other in others), default=math.inf)
        return worker.kills_at(missed_since, self._limits.seconds)

    def _kill(self) -> None:
        """Kill processes whose time is over."""
        for worker in list(self._workers.values()):
            if self._now < self._kills_at(worker):
                continue
            if worker.phase == Phase.STARTING:
                self._kill_at_fault(worker, f"it was not ready within {self._limits.seconds:g} s")
            else:
                worker.is_killed = True
                how = "others wait for it" if worker.phase == Phase.MEMBER else "it did not end when it was dismissed"
                self._actions.append(Kill(worker.number, how))

    def _kill_at_fault(self, worker: ElasticWorker, reason: str) -> None:
        self._slots.fail(worker.slot, self._now)
        worker.phase, worker.is_killed = Phase.ENDING, True
        self._actions.append(Kill(worker.number, reason))

    def _openings(self) -> list[ProcessSlot]:
        return self._slots.open(self._now, {worker.slot for worker in self._workers.values()})

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
