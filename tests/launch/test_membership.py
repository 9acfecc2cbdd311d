"""The members of an elastic job under random orders of events in virtual time, and the cases that users meet."""

from __future__ import annotations

import heapq
import math
import random
from itertools import groupby
from typing import Any

import pytest

from hvdkit.launch.actions import Dismiss, EndJob, Form, Interrupt, Kill, Limits, Start
from hvdkit.launch.membership import Membership
from hvdkit.launch.slots import ProcessSlot

SECONDS = 100.0  # that a job waits
LONGEST_WAIT = 4 * SECONDS  # of a process that has asked: for others that are killed, and then for new ones
MOST_EVENTS = 400


class Process:
    """A process as it really is: ``ticket`` is its generation, 0 before the first; ``asked_at`` None while it works."""

    def __init__(self, slot: ProcessSlot) -> None:
        self.slot, self.ticket, self.steps = slot, 0, 0
        self.asked_at: float | None = None
        self.is_dismissed = self.is_hung = False


class VirtualJob:
    """A job in virtual time, whose processes crash, hang, finish and start as ``choose`` decides."""

    def __init__(self, seed: int) -> None:
        self.choose = random.Random(seed)
        least = self.choose.randint(1, 3)
        start = self.choose.randint(least, 5)
        cooldown = (10.0, 50.0) if self.choose.random() < 0.2 else None
        resets = self.choose.randint(0, 6) if self.choose.random() < 0.2 else None
        self.limits = Limits(start, least, self.choose.randint(start, 6), SECONDS, resets, cooldown)
        self.membership = Membership(self.limits)
        self.now, self.serial = 0.0, 0
        self.events: list[tuple[float, int, Any, tuple[Any, ...]]] = []
        self.processes: dict[int, Process] = {}
        self.generation = self.served = 0
        self.members: tuple[int, ...] = ()
        self.is_finishing = self.is_faulty = False
        self.died_since = False
        self.ended: str | None = None
        self.hosts = {f"h{index}": self.choose.randint(1, 3) for index in range(self.choose.randint(1, 4))}
        self.at(0.0, self.find_hosts)
        for _ in range(self.choose.randint(0, 3)):
            self.at(self.choose.uniform(1, 300), self.change_hosts)

    def at(self, delay: float, event: Any, *arguments: Any) -> None:
        self.serial += 1
        heapq.heappush(self.events, (self.now + delay, self.serial, event, arguments))

    def run(self) -> None:
        while self.ended is None and self.served < MOST_EVENTS:
            wakes_at = self.membership.wakes_at()
            assert wakes_at > self.now
            if not self.events and wakes_at == math.inf:
                assert self.running(), "the job waits for ever"
                return
            self.served += 1
            if not self.events or wakes_at < self.events[0][0]:
                self.now = wakes_at
                self.carry_out(self.membership.time_passed(self.now))
            else:
                self.now, _, event, arguments = heapq.heappop(self.events)
                event(*arguments)
            for number, process in self.processes.items():
                waited = 0.0 if process.asked_at is None else self.now - process.asked_at
                # Newcomers may be in reserve while the members are as many as may be.
                assert waited < LONGEST_WAIT or (not process.ticket and self.running()), (number, waited)

    def running(self) -> list[int]:
        return [n for n in self.members if n in self.processes and self.processes[n].asked_at is None]

    def find_hosts(self) -> None:
        self.carry_out(self.membership.hosts_found(self.now, dict(self.hosts)))

    def change_hosts(self) -> None:
        host, way = self.choose.choice(list(self.hosts)), self.choose.random()
        if way < 0.3:
            self.hosts[f"new{self.serial}"] = self.choose.randint(1, 3)
        elif way < 0.5:
            del self.hosts[host]
            self.hosts[f"new{self.serial}"] = 2
        elif way < 0.7:
            self.carry_out(self.membership.host_leaves(self.now, host))
            return
        elif way < 0.85:
            for number in [number for number, each in self.processes.items() if each.slot.host == host]:
                self.forget(number)
            self.carry_out(self.membership.host_lost(self.now, host))
            return
        else:
            self.hosts[host] = self.choose.randint(1, 3)
        self.find_hosts()

    def ask(self, number: int, generation: int, failed: bool) -> None:
        process = self.processes.get(number)
        is_working = process is not None and not process.is_hung and not process.is_dismissed
        if not is_working or process.ticket != generation or process.asked_at is not None:
            return
        process.asked_at = self.now
        self.died_since |= failed
        self.carry_out(self.membership.asked(self.now, number, process.steps, failed))

    def end(self, number: int, succeeded: bool, generation: int | None = None) -> None:
        process = self.processes.get(number)
        if process is None or (generation is not None and (process.ticket, process.asked_at) != (generation, None)):
            return
        self.is_finishing |= succeeded and not process.is_dismissed
        self.forget(number, succeeded or process.is_dismissed)
        self.carry_out(self.membership.ended(self.now, number, succeeded))

    def forget(self, number: int, is_loss: bool = False) -> None:
        """Remove a dead process; the other members notice that, unless they have no use for it."""
        process = self.processes.pop(number)
        if process.ticket == self.generation and number in self.members and not is_loss:
            self.died_since = True
            self.have_all_ask()

    def have_all_ask(self) -> None:
        gained = self.choose.randint(0, 0 if self.is_faulty else 3)
        for number in self.running():
            self.processes[number].steps += max(0, gained - self.choose.randint(0, 1))
            self.at(self.choose.uniform(0.0, 0.5), self.ask, number, self.generation, True)

    def carry_out(self, actions: list[Any]) -> None:
        for action in actions:
            assert self.ended is None, "nothing follows the end"
            {
                Start: self.started, Kill: self.killed, Interrupt: self.interrupted, Form: self.formed,
                Dismiss: self.dismissed, EndJob: self.over,
            }[type(action)](action)  # fmt: skip

    def started(self, action: Start) -> None:
        assert action.worker not in self.processes
        assert action.slot.number < self.hosts.get(action.slot.host, 0)
        assert action.slot not in [process.slot for process in self.processes.values()], "two processes in a slot"
        assert not self.is_finishing
        process = self.processes[action.worker] = Process(action.slot)
        way = self.choose.random()
        if way < 0.1:
            self.at(self.choose.uniform(0.1, 20), self.end, action.worker, False)
        elif way < 0.13:
            process.is_hung = True
        else:
            self.at(self.choose.uniform(0.1, 30), self.ask, action.worker, 0, False)

    def killed(self, action: Kill) -> None:
        process = self.processes[action.worker]
        assert process.asked_at is None, "it has asked in time"
        self.at(self.choose.uniform(0.0, 1.0), self.end, action.worker, False)

    def interrupted(self, action: Interrupt) -> None:
        assert set(action.workers) == set(self.running()) == set(self.members) & set(self.processes)
        delay = self.choose.uniform(0.1, 5.0)
        for number in action.workers:
            self.at(delay + self.choose.uniform(0.0, 0.1), self.ask, number, self.generation, False)

    def formed(self, action: Form) -> None:
        members = [self.processes[number] for number in action.workers]
        assert action.generation == self.generation + 1
        assert not self.running(), "a member of the generation before trains yet"
        assert all(process.asked_at is not None and not process.is_dismissed for process in members)
        assert len(set(action.workers)) == len(members) <= self.limits.most
        assert len(members) >= (1 if self.is_finishing else self.limits.least)
        newcomers = [rank for rank, process in enumerate(members) if not process.ticket]
        assert list(action.newcomers) == newcomers
        assert self.generation == 0 or 0 not in newcomers, "rank 0 has no state"
        assert action.changed >= (self.died_since or bool(newcomers))
        hosts = [host for host, _ in groupby(process.slot.host for process in members)]
        assert len(set(hosts)) == len(hosts), "the ranks of a host are no neighbours"
        self.generation, self.members, self.died_since = action.generation, action.workers, False
        for process in members:
            process.ticket, process.asked_at = action.generation, None
            process.steps = max(member.steps for member in members)
        self.go_on()

    def go_on(self) -> None:
        """Let something happen to the generation that has just begun."""
        way, delay, generation = self.choose.random(), self.choose.uniform(0.0, 200.0), self.generation
        unlucky = self.choose.choice(self.members)
        if way < 0.5:
            self.at(delay, self.end, unlucky, False, generation)
        elif way < 0.6:  # it stops, and the others notice
            self.processes[unlucky].is_hung = True
            self.at(delay, self.notice, generation)
        elif way < 0.7:  # the network between two of them fails
            self.at(delay, self.notice, generation)
        elif way < 0.85:
            for number in self.members:
                succeeds = number != unlucky or self.choose.random() < 0.8
                self.at(delay + self.choose.uniform(0.0, 1.0), self.end, number, succeeds, generation)

    def notice(self, generation: int) -> None:
        if generation == self.generation:
            self.have_all_ask()

    def dismissed(self, action: Dismiss) -> None:
        process = self.processes[action.worker]
        assert process.asked_at is not None
        process.is_dismissed, process.asked_at = True, None
        self.at(self.choose.uniform(0.0, 1.0), self.end, action.worker, self.choose.random() < 0.95)

    def over(self, action: EndJob) -> None:
        assert action.reason or not [number for number in self.members if number in self.processes]
        assert not self.running(), "the job ended while members trained"
        self.ended = action.reason


@pytest.mark.parametrize("part", range(10))
def test_random_orders_of_events(part, request):
    count = 10_000 if request.config.getoption("--all") else 300
    reasons: dict[str, int] = {}
    for seed in range(part * count, (part + 1) * count):
        job = VirtualJob(seed)
        try:
            job.run()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        reason = "goes on" if job.ended is None else job.ended.split(" ")[0] or "success"
        reasons[reason] = reasons.get(reason, 0) + 1
    assert reasons.keys() >= {"success", "no", "only", "3", "the", "goes on"}, reasons
