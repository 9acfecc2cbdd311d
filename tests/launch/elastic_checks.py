"""The driver of a simulated elastic job: it checks each action of the state machine against the truth."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from hvdkit.launch.elastic.actions import Action, Announce, Dismiss, EndJob, Form, Interrupt, Kill, Limits, Start
from hvdkit.launch.elastic.membership import Membership
from hvdkit.launch.elastic.slots import ProcessSlot
from tests.launch.elastic_truth import HANG_NOTICE, LATENCY, NOTICE, Generation, Host, Life, Process, State, World

SLACK = 1e-6  # of times that are added in another order


class Driver:
    """The driver of a job in a simulated world. ``reason``: that of the job's end, None before."""

    def __init__(self, world: World, limits: Limits) -> None:
        self.world, self.limits = world, limits
        self.machine = Membership(limits)
        self.reason: str | None = None
        self.kills: dict[int, str] = {}
        self.interrupts: list[Interrupt] = []
        self.starts: list[Start] = []
        self.announced: list[str] = []
        self.form_times: list[float] = []
        self.listed: dict[str, int] = {}
        self.leaving: set[str] = set()
        self.asked_at: dict[int, float] = {}  # processes whose ask was not answered yet
        self.dismissed_at: dict[int, float] = {}
        self.failures: defaultdict[ProcessSlot, list[float]] = defaultdict(list)
        self.host_losses: defaultdict[str, int] = defaultdict(int)
        self.taught: dict[int, bool] = {}  # ends that the machine was told of
        self.failed_starts = 0
        self.has_asked = self.is_finishing = False
        self.short_since: float | None = None
        self.failed_at: list[int] = []  # the newest steps at the end of each generation that failed
        self.judged = 0  # the last generation whose failure was noted
        self.wakes = self.events = 0
        world.tell = self.tell

    # Time

    def run(self, seconds: float) -> None:
        """Let time pass, until the job has ended."""
        until, world = self.world.now + seconds, self.world
        while self.reason is None:
            wakes, due = self.machine.wakes_at(), world.next_at()
            assert wakes > world.now, "the machine wants to wake in the past"
            if min(wakes, due) > until:
                world.now = until
                return
            if wakes < due:
                world.now = wakes
                self.wakes += 1
                assert self.wakes < 20 * self.events + 100, "the machine wakes again and again"
                self.do(self.machine.time_passed(wakes))
                assert not self.machine.time_passed(wakes), "something is due, after the machine has acted"
            else:
                before = (world.now + due) / 2
                if world.random.random() < 0.2 and before < due:
                    assert not self.machine.time_passed(before), "something was due before the machine wanted to wake"
                world.next_event()

    def run_until(self, size: int, seconds: float = 100.0) -> Generation:
        """Let time pass until so many members train."""
        end = self.world.now + seconds
        while self.reason is None and self.world.now < end:
            last = self.world.generations[-1] if self.world.generations else None
            if last is not None and len(last.members) == size and last.life == Life.TRAINING:
                return last
            self.run(0.1)
        raise AssertionError(f"no generation of {size}: {self.story()}")

    def finish(self, seconds: float = 60.0) -> None:
        """Have the program finish, and the job end with success."""
        self.world.is_last_step = True
        self.run(seconds)
        assert self.reason == "", self.story()

    def story(self) -> str:
        """Return the generations and the reason."""
        generations = [
            (generation.number, [process.number for process in generation.members], generation.life.name)
            for generation in self.world.generations
        ]
        return f"t={self.world.now:.1f} reason={self.reason!r} {generations} kills={self.kills}"

    # Events

    def find(self, hosts: Mapping[str, int]) -> None:
        """Have discovery answer."""
        if self.reason is None:
            self.world.causes += 1
            self.events += 1
            for name in hosts:
                if name not in self.listed:
                    self.host_losses.pop(name, None)
                    for slot in [slot for slot in self.failures if slot.host == name]:
                        del self.failures[slot]
                if name not in self.world.hosts:
                    self.world.hosts[name] = Host(name)
            self.listed, self.leaving = dict(hosts), self.leaving & hosts.keys()
            self._note_shortness()
            self.do(self.machine.hosts_found(self.world.now, hosts))

    def tell(self, event: str, *values: Any) -> None:
        """Tell the machine of an event."""
        if self.reason is not None:
            return
        self.events += 1
        now, name = self.world.now, values[0]
        if event == "asked":
            if name not in self.dismissed_at and name not in self.kills:
                self.asked_at[name] = now
                self.has_asked = True
        elif event == "ended":
            self._note_end(self.world.processes[name], bool(values[1]))
        elif event == "host_lost":
            self.host_losses[str(name)] += 1
            for process in self.world.processes.values():
                if process.host.name == name and process.number not in self.taught:
                    self.taught[process.number] = False
                    self.asked_at.pop(process.number, None)
        else:
            self.world.causes += 1
            self.leaving.add(str(name))
        self._note_shortness()
        self.do(getattr(self.machine, event)(now, *values))
        if self.reason is None:
            self._check_answers()

    def _note_end(self, process: Process, succeeded: bool) -> None:
        has_waited = self.asked_at.pop(process.number, None) is not None
        self.taught[process.number] = succeeded and not has_waited
        self.failed_starts += not succeeded and not self.has_asked and process.number not in self.kills
        if process.number not in self.dismissed_at:
            may_finish = process.generation is not None or not self.world.generations
            if succeeded and not has_waited and self._must_leave(process):
                pass  # it left, or has finished with the others
            elif succeeded and not has_waited and may_finish:
                self.is_finishing = True
            else:
                self.failures[ProcessSlot(process.host.name, process.slot)].append(self.world.now)

    def _must_leave(self, process: Process) -> bool:
        name = process.host.name
        is_alone = process.generation is not None and self.limits.most == 1  # it cannot hand its state over
        return not is_alone and (name in self.leaving or process.slot >= self.listed.get(name, 0))

    def _is_running(self) -> bool:
        """True if a member of the newest generation neither asked nor ended, as the driver sees it."""
        members = self.world.generations[-1].members if self.world.generations else []
        return any(each.number not in self.asked_at and each.number not in self.taught for each in members)

    def _note_shortness(self) -> None:
        """Note since when too few processes wait for a generation."""
        if self._is_running():
            self.short_since = None
        elif self.short_since is None:
            self.short_since = self.world.now

    def _check_answers(self) -> None:
        """Check that no process waits too long for its answer."""
        bound = 2 * self.limits.seconds + 60
        for number, at in self.asked_at.items():
            assert self.world.now - at < bound, f"process {number} gets no answer: {self.story()}"

    # Actions

    def do(self, actions: list[Action]) -> None:
        """Carry out actions."""
        for action in actions:
            assert self.reason is None, f"{action} after the end of the job"
            if isinstance(action, Announce):
                self.announced.append(action.text)
            elif isinstance(action, Start):
                self._start(action)
            elif isinstance(action, Form):
                self._form(action)
            elif isinstance(action, Interrupt):
                self._interrupt(action)
            elif isinstance(action, Dismiss):
                self._dismiss(action)
            elif isinstance(action, Kill):
                self._kill(action)
            else:
                assert isinstance(action, EndJob)
                self.reason = action.reason
                self._check_end(action.reason)

    def _start(self, action: Start) -> None:
        name, number = action.slot
        world, now = self.world, self.world.now
        assert action.worker == len(world.processes)
        assert number < self.listed.get(name, 0), "a process is started in a slot that there is not"
        assert name not in self.leaving, "a process is started on a host that leaves"
        living = [process for process in world.processes.values() if process.number not in self.taught]
        assert all((process.host.name, process.slot) != action.slot for process in living), "two processes in a slot"
        assert not self.is_finishing, "a process is started while others finish"
        present = [
            process for process in living if process.number not in self.dismissed_at and not self._must_leave(process)
        ]
        present = [process for process in present if process.number not in self.kills or process.generation]
        assert len(present) < (self.limits.most if world.generations else self.limits.start), "too many processes"
        failures = self.failures[action.slot]
        if self.limits.cooldown is None:
            if failures:
                pause = 2.0 ** min(len(failures) - 1, 1)
                assert now - failures[-1] >= pause - SLACK or now - failures[-1] > 600, "no pause after a failure"
            assert len([at for at in failures if now - at < 600]) < 3, "three failures, but no closed slot"
        process = Process(action.worker, world.hosts[name], number, now)
        world.processes[action.worker] = process
        self.starts.append(action)
        world.order(process.host, world.start, process)

    def _form(self, form: Form) -> None:
        world, limits = self.world, self.limits
        former = world.generations[-1] if world.generations else None
        members = [world.processes[number] for number in form.workers]
        assert form.generation == len(world.generations) + 1
        assert len(set(form.workers)) == len(form.workers)
        for process in members:
            assert process.number in self.asked_at, "a member has not asked"
        for process in former.members if former else []:
            assert process.state in (State.WAITING, State.DEAD), "two generations at once"
        waiting = [world.processes[number] for number in self.asked_at]
        newest = max(process.newness for process in waiting)
        assert members[0].newness == newest, f"rank 0 has {members[0].steps} of {newest} steps"
        assert newest >= 0 or former is None or world.newest <= 0, "the state is lost"
        holders = [process.newness for process in world.living() if process.number not in self.dismissed_at]
        assert newest >= max(holders, default=-1), "a process that was not asked has a newer state"
        assert form.needs_sync or {process.steps for process in members} == {newest}, "states differ"
        least = 1 if self.is_finishing else limits.least
        assert least <= len(members) <= limits.most, "too few or too many"
        if former is None and world.now - (self.short_since or 0.0) < limits.seconds and limits.hosts_may_change:
            assert len(members) >= limits.start or self.is_finishing, "the first generation begins too early"
        hosts = [process.host for process in members]
        assert all(hosts[i] == hosts[i + 1] or hosts[i] not in hosts[i + 1 :] for i in range(len(hosts) - 1))
        self._judge(newest)
        self.form_times.append(world.now)
        generation = Generation(form.generation, members, form.needs_sync, newest)
        world.form(generation)
        assert len(world.generations) - 1 <= world.causes, f"generations without a cause: {self.story()}"
        for process in members:
            del self.asked_at[process.number]
            world.order(process.host, world.enter, process, generation)
        self.short_since = None

    def _judge(self, newest: int) -> None:
        """Note if the last generation failed, and at which step."""
        former = self.world.generations[-1] if self.world.generations else None
        if former is not None and self.judged < former.number:
            self.judged = former.number
            if former.life == Life.BROKEN or former.deaths:
                self.failed_at.append(newest)

    def _interrupt(self, action: Interrupt) -> None:
        assert self.world.generations
        members = self.world.generations[-1].members
        assert set(action.workers) <= {process.number for process in members}, "an interrupt for others than members"
        assert action.workers
        gone = [self.world.processes[number] for number in action.gone]
        for process in gone:
            assert process in members, "the members are told that a stranger is gone"
            assert process.state != State.MEMBER, f"a healthy process is called gone: {process.number}"
        self.interrupts.append(action)
        for number in action.workers:
            process = self.world.processes[number]
            self.world.order(process.host, self.world.interrupt, process, gone)

    def _dismiss(self, action: Dismiss) -> None:
        world, process = self.world, self.world.processes[action.worker]
        assert process.number in self.asked_at, "a process is dismissed that has not asked"
        assert self._is_running(), "a process is dismissed though nobody trains"
        members = self.world.generations[-1].members
        staying = [each for each in members if not self._must_leave(each) and each.number not in self.taught]
        new = [world.processes[number] for number in self.asked_at if number != action.worker]
        new = [each for each in new if each not in staying and not self._must_leave(each)]
        is_surplus = len(staying) + len(new) >= self.limits.most
        assert self._must_leave(process) or self.is_finishing or is_surplus, "a process is dismissed that is needed"
        del self.asked_at[process.number]
        self.dismissed_at[process.number] = self.world.now
        self.world.order(process.host, self.world.dismiss, process)

    def _kill(self, action: Kill) -> None:
        process = self.world.processes[action.worker]
        assert action.worker not in self.kills, "a process is killed twice"
        assert self._is_guilty(process, action.reason), f"a healthy process is killed: {action} {process.state}"
        self.kills[action.worker] = action.reason
        if self.asked_at.pop(action.worker, None) is not None or process.state == State.LOADING:
            self.failures[ProcessSlot(process.host.name, process.slot)].append(self.world.now)
            self.dismissed_at.setdefault(action.worker, self.world.now)
        self.world.order(process.host, self.world.die, process)

    def _is_guilty(self, process: Process, reason: str) -> bool:
        now, seconds = self.world.now, self.limits.seconds
        if process.number in self.dismissed_at:
            return now - self.dismissed_at[process.number] >= 30 - SLACK
        if process.state == State.DEAD:
            return True
        if "could not connect" in reason:
            former = self.world.generations[-1]
            holders = [member for member in former.members if member.steps is not None]
            is_apart = not process.host.is_reachable or not all(member.host.is_reachable for member in holders)
            is_needed = len(holders) + 1 < self.limits.least  # they cannot join host by host
            is_unreachable = former.is_unconnected and (is_apart or is_needed)
            return process.steps is None and not former.deaths and (is_unreachable or former.hangs > 0)
        if "not ready" in reason:
            return process.number not in self.asked_at and now - process.started_at >= seconds - SLACK
        is_silent = process.is_hung or process.host.is_cut
        return is_silent or now - process.resumed_at < HANG_NOTICE + NOTICE + LATENCY

    # The end

    def _check_end(self, reason: str) -> None:
        """Check that the reason of the job's end is true."""
        world, limits = self.world, self.limits
        waiting = [world.processes[number] for number in self.asked_at]
        newest = max((process.newness for process in waiting), default=-1)
        members = world.generations[-1].members if world.generations else []
        self._judge(newest)
        if reason in ("", "a rank failed while others finished"):
            assert not self._is_running(), self.story()
            ends = [self.taught[process.number] for process in members if process not in waiting]
            assert all(process.steps is None for process in waiting if process in members), "a rank is cut off"
            if not members:
                ends = [self.taught[number] for number in self.taught if number not in self.dismissed_at]
            assert all(ends) == (reason == ""), f"{ends} {self.story()}"
            assert reason == "" or self.is_finishing, self.story()
            assert ends
        elif reason == "no rank with the state of the job is left":
            able = [process for process in world.living() if process.number not in self.dismissed_at]
            assert not any(process.steps is not None and not process.host.is_cut for process in able), self.story()
            assert world.newest >= 0 or all(process.state == State.DEAD for process in members), self.story()
            assert not all(self.taught.get(process.number) for process in members), "a success is called a failure"
        elif match := re.fullmatch(r"(\d+) processes failed before any of them was ready", reason):
            assert not self.has_asked
            assert 3 <= int(match[1]) == self.failed_starts, f"{self.failed_starts} {self.story()}"
        elif match := re.match(r"only (\d+) of at least (\d+) ranks", reason):
            self._check_shortage(reason, int(match[1]), int(match[2]), waiting)
        elif match := re.fullmatch(r"(\d+) failures (?:after step (\d+)|before the first step): .*", reason):
            step = int(match[2]) if match[2] else -1
            assert int(match[1]) == 3
            assert "connect" not in reason or not world.generations[-1].deaths, reason
            assert self.failed_at[-3:] == [step] * 3, f"{self.failed_at} {self.story()}"
        else:
            match = re.fullmatch(r"reset count (\d+) has exceeded limit (\d+)", reason)
            assert match is not None, reason
            assert limits.resets == int(match[2]) == len(world.generations) - 1 == int(match[1])

    def _check_shortage(self, reason: str, count: int, least: int, waiting: list[Process]) -> None:
        limits, world = self.limits, self.world
        former = [process for process in waiting if process.generation]
        new = [process for process in waiting if not process.generation and not self._must_leave(process)]
        assert least == (1 if self.is_finishing else limits.least)
        assert count == len([*former, *new]) < least, f"{former} {new} {self.story()}"
        assert self.short_since is not None
        if reason.endswith(" s"):
            assert world.now - self.short_since >= limits.seconds - SLACK, "too early"
            return
        shortage = f"only {count} of at least {least} ranks, and no slot in which another rank may be started"
        assert reason == shortage, reason
        assert not limits.hosts_may_change
        for process in world.processes.values():
            is_coming = process.number not in self.taught and process.number not in self.asked_at
            assert not is_coming, f"{process.number} may become ready"
        taken = {(process.host.name, process.slot) for process in waiting}
        for host, slots in self.listed.items():
            for slot in (ProcessSlot(host, number) for number in range(slots)):
                is_closed = len(self.failures[slot]) >= 3 or self.host_losses[host] >= 3 or host in self.leaving
                is_cooling = limits.cooldown is not None and math.isinf(limits.cooldown[1])
                assert is_closed or is_cooling or slot in taken, f"{slot} is open"
