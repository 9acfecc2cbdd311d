"""Decisions on the ranks of an elastic job: a state machine without a clock, a socket or a process.

The launcher tells it each event with the time, and carries out the actions that it returns. It decides one sequence of
generations. A process that wants to be in the next one asks, and is answered: by a generation that it is in, by its
dismissal, or by the end of the job. A generation begins when all living members of the one before have asked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from hvdkit.launch.actions import Action, Dismiss, EndJob, Form, Interrupt, Kill, Limits, Start
from hvdkit.launch.slots import ProcessSlot, Slots

INCIDENTS = 3  # without a step between them end the job


class Phase(Enum):
    """The progress of a process."""

    STARTING = 1  # it imports and builds its model
    WAITING = 2  # it has asked
    RUNNING = 3  # it is a member of the present generation
    DISMISSED = 4


@dataclass
class _Worker:
    slot: ProcessSlot
    since: float  # when its phase began
    phase: Phase = Phase.STARTING
    has_state: bool = False  # it has been a member
    leaves: bool = False
    steps: int = 0  # that it had applied when it asked


class Membership:
    """The members of a job, and all that decides who comes next."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._slots = Slots(limits.cooldown)
        self._workers: dict[int, _Worker] = {}  # all that live
        self._started = self._generation = 0
        self._short_since: float | None = None  # since when no generation runs, for too few ranks
        self._awaited_since: float | None = None  # since when a member waits for the others to ask
        self._has_failed = False  # a member, since the generation began
        self._failed_steps, self._incidents = -1, 0
        self._is_interrupted = self._is_finishing = self._is_over = False
        self._now = 0.0
        self._actions: list[Action] = []

    def hosts_found(self, now: float, hosts: Mapping[str, int]) -> list[Action]:
        """Note the hosts that there are, with their slots. The processes of a host that is gone leave."""
        self._slots.found(hosts)
        for worker in self._workers.values():
            worker.leaves |= not self._slots.exists(worker.slot)
        return self._decide(now)

    def host_leaves(self, now: float, host: str) -> list[Action]:
        """Note that a host will be taken away: its processes leave, and nothing is started there any more."""
        self._slots.close(host)
        for worker in self._workers.values():
            worker.leaves |= worker.slot.host == host
        return self._decide(now)

    def host_lost(self, now: float, host: str) -> list[Action]:
        """Note that a host is lost, and that all its processes are dead."""
        self._slots.close(host)
        for number, worker in list(self._workers.items()):
            if worker.slot.host == host:
                self._lose(now, number)
        return self._decide(now)

    def asked(self, now: float, number: int, steps: int = 0, failed: bool = False) -> list[Action]:
        """Note that a process wants to be in the next generation.

        ``steps``: the steps that it has applied. ``failed``: it asks after an error, not since it was told to.
        """
        worker = self._workers.get(number)
        if worker is not None and worker.phase != Phase.DISMISSED:
            self._has_failed |= failed
            if worker.has_state and self._awaited_since is None:
                self._awaited_since = now
            worker.phase, worker.since, worker.steps = Phase.WAITING, now, steps
        return self._decide(now)

    def ended(self, now: float, number: int, succeeded: bool) -> list[Action]:
        """Note the end of a process."""
        worker = self._workers.get(number)
        if worker is not None and worker.phase == Phase.DISMISSED:
            del self._workers[number]
        elif worker is not None and worker.phase != Phase.WAITING and succeeded:
            self._is_finishing = True  # also where a script never asks
            del self._workers[number]
        elif worker is not None:
            self._lose(now, number)
        return self._decide(now)

    def time_passed(self, now: float) -> list[Action]:
        """Act on the time; call this when ``wakes_at`` has come."""
        return self._decide(now)

    def wakes_at(self) -> float:
        """Return the next time at which something is due, infinity if only an event can change anything."""
        times = [self._slots.opens_at(self._now)]
        times += [since + self._limits.seconds for since in self._awaited().values()]
        if self._short_since is not None:
            times.append(self._short_since + self._limits.seconds)
        return math.inf if self._is_over else min((time for time in times if time > self._now), default=math.inf)

    def _decide(self, now: float) -> list[Action]:
        self._now, self._actions = now, []
        if not self._is_over:
            self._start()
            for number, since in self._awaited().items():
                if now >= since + self._limits.seconds:
                    self._workers[number].since = now
                    self._actions.append(Kill(number))
            self._form()
        if not self._is_over:
            self._dismiss_needless()
            self._interrupt()
        return self._actions

    def _lose(self, now: float, number: int) -> None:
        """Remove a process that has failed, and close its slot or its host if it failed too often."""
        worker = self._workers.pop(number)
        self._has_failed |= worker.has_state or self._is_finishing
        if worker.has_state:
            self._awaited_since = now if self._awaited_since is None else self._awaited_since
        self._slots.failed(worker.slot, now)

    def _in(self, phase: Phase) -> list[int]:
        return [number for number, worker in self._workers.items() if worker.phase == phase]

    def _start(self) -> None:
        """Start processes in open slots, as many as are wanted."""
        if self._is_finishing:
            return
        wanted = self._limits.most if self._generation else self._limits.start
        room = max(0, wanted - sum(not worker.leaves for worker in self._workers.values()))
        for slot in self._slots.open(self._now, {worker.slot for worker in self._workers.values()})[:room]:
            self._workers[self._started] = _Worker(slot, self._now)
            self._actions.append(Start(self._started, slot))
            self._started += 1

    def _awaited(self) -> dict[int, float]:
        """Return the processes that must ask, those that start and members that others await, and since when."""
        awaited = {number: self._workers[number].since for number in self._in(Phase.STARTING)}
        if self._awaited_since is not None:
            since = self._awaited_since
            awaited |= {number: max(self._workers[number].since, since) for number in self._in(Phase.RUNNING)}
        return awaited

    def _form(self) -> None:
        """Begin a generation, or end the job, if it is time."""
        if self._in(Phase.RUNNING):
            return
        holders = [number for number in self._in(Phase.WAITING) if self._workers[number].has_state]
        if (self._generation and not holders) or (self._is_finishing and not self._workers):
            has_succeeded = self._is_finishing and not self._has_failed
            self._end("" if has_succeeded else "no rank with the state of the job is left")
            return
        self._short_since = self._now if self._short_since is None else self._short_since
        is_late = self._now >= self._short_since + self._limits.seconds
        least = 1 if self._is_finishing else self._limits.least
        enough = least if self._generation or is_late else self._limits.start
        chosen = self._choose(holders, least)
        if len(chosen) >= enough:
            self._begin(chosen)
        elif is_late:
            self._end(f"only {len(chosen)} of at least {least} ranks for {self._limits.seconds:g} s")

    def _choose(self, holders: list[int], least: int) -> list[int]:
        """Return the members of the next generation, in the order of their ranks.

        A process that leaves stays on where no other has the state, or the others are too few. The ranks of a host are
        neighbours, and rank 0 has the state, as Horovod's scripts expect.
        """
        newcomers = [] if self._is_finishing else [n for n in self._in(Phase.WAITING) if not self._workers[n].has_state]
        staying = [number for number in holders if not self._workers[number].leaves]
        leaving = [number for number in holders if self._workers[number].leaves]
        newcomers = [number for number in newcomers if not self._workers[number].leaves]
        room = self._limits.most - max(len(staying), bool(holders))
        chosen = [*staying, *newcomers[: max(room, 0)]]
        needed = max(least - len(chosen), int(not staying))
        chosen = [*chosen, *leaving[:needed]][: self._limits.most]
        with_state = {self._workers[number].slot.host for number in chosen if self._workers[number].has_state}

        def place(number: int) -> tuple[bool, int, str, bool, int]:
            has_state, (host, slot) = self._workers[number].has_state, self._workers[number].slot
            return host not in with_state, self._slots.index(host), host, not has_state, slot

        return sorted(chosen, key=place)

    def _begin(self, chosen: list[int]) -> None:
        """Begin a generation, unless failures repeat themselves."""
        workers = [self._workers[number] for number in chosen]
        steps = {worker.steps for worker in workers if worker.has_state}
        if self._has_failed:
            newest = max(steps, default=0)
            self._incidents = self._incidents + 1 if newest == self._failed_steps else 1
            self._failed_steps = newest
            if self._incidents >= INCIDENTS:
                self._end(f"{INCIDENTS} failures after step {newest}: the data or the program is at fault")
                return
        if self._limits.resets is not None and self._generation > self._limits.resets:
            self._end(f"the job was formed anew {self._limits.resets} times")
            return
        self._generation += 1
        newcomers = tuple(rank for rank, worker in enumerate(workers) if not worker.has_state)
        changed = self._has_failed or bool(newcomers) or len(steps) > 1
        self._actions.append(Form(self._generation, tuple(chosen), newcomers, changed))
        for worker in workers:
            worker.phase, worker.since, worker.has_state = Phase.RUNNING, self._now, True
        self._has_failed = self._is_interrupted = False
        self._short_since = self._awaited_since = None

    def _dismiss_needless(self) -> None:
        """Dismiss processes that leave, and newcomers once the job finishes, unless a generation may need them yet."""
        is_running = bool(self._in(Phase.RUNNING))
        for number in self._in(Phase.WAITING):
            worker = self._workers[number]
            is_needless = (worker.leaves or self._is_finishing) and not worker.has_state
            if is_needless or (worker.leaves and is_running and self._awaited_since is None):
                worker.phase = Phase.DISMISSED
                self._actions.append(Dismiss(number))

    def _interrupt(self) -> None:
        """Have the members ask if others are ready to join, or some can leave."""
        members = self._in(Phase.RUNNING)
        if not members or self._is_interrupted or self._is_finishing or self._awaited_since is not None:
            return  # they ask anyway, or end
        staying = sum(not self._workers[number].leaves for number in members)
        ready = len(self._in(Phase.WAITING))  # newcomers that stay
        joining = min(ready, self._limits.most - max(staying, 1))
        can_leave = max(self._limits.least, 1) <= staying < len(members)
        if joining > 0 or can_leave:
            self._is_interrupted = True
            self._actions.append(Interrupt(tuple(members)))

    def _end(self, reason: str) -> None:
        self._is_over = True
        self._actions.append(EndJob(reason))
