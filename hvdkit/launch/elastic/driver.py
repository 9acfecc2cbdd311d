"""The driver of an elastic job: it tells ``membership`` what happens, and carries out what that decides."""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import selectors
import signal
import time
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

from hvdkit.environments.elastic import DISMISSAL, INTERRUPT, TICKET
from hvdkit.environments.ticket import Member, Ticket
from hvdkit.launch import worker
from hvdkit.launch.elastic import agent
from hvdkit.launch.elastic.actions import Action, Announce, Dismiss, EndJob, Form, Interrupt, Kill, Start
from hvdkit.launch.elastic.agent import Frame
from hvdkit.launch.elastic.discovery import Discovery
from hvdkit.launch.elastic.found import HostsFound
from hvdkit.launch.elastic.host import AGENT, AgentHost, HostedProcess, JoinedAgent, StartedAgent
from hvdkit.launch.elastic.job import ElasticJob, ElasticOutcome, ProcessEnd
from hvdkit.launch.elastic.listener import Applicant, Listener, refuse
from hvdkit.launch.elastic.membership import Membership
from hvdkit.launch.elastic.printer import Printer
from hvdkit.launch.elastic.slots import ProcessSlot, slots_in_words
from hvdkit.launch.ssh import is_local
from hvdkit.launch.supervise import Child

ENDING_SECONDS = agent.END_SECONDS + 1.0  # for the agents to end
_FOR_EVER = 3600.0
_is_local = cache(is_local)


class ElasticDriver:
    """The state of a running job."""

    def __init__(
        self, job: ElasticJob, hosts: Mapping[str, int] | Discovery, wake: int, listener: Listener | None = None
    ) -> None:
        self._job, self._wake = job, wake
        self._membership = Membership(job.limits)
        self._found, self._listener = HostsFound(hosts), listener
        self._hosts: dict[str, AgentHost] = {}
        self._processes: dict[int, HostedProcess] = {}
        self._losses: list[Callable[[], str]] = []  # of members, since the last generation began: how to tell of them
        self._outcome = ElasticOutcome()
        self._closes_at = math.inf  # when the agents are told to end, if processes save until then
        self._ends_at = math.inf  # when what is left is killed
        self._selector = selectors.DefaultSelector()
        self._selector.register(wake, selectors.EVENT_READ)
        self._printer = Printer(lambda: os.kill(os.getpid(), signal.SIGCHLD))

    def run(self) -> ElasticOutcome:
        """Run the job, and return its end when all its processes have ended."""
        try:
            while self._outcome.reason is None or self._hosts:
                self._look()
                if time.monotonic() >= self._ends_at:
                    break
                if self._printer.error is not None:
                    raise self._printer.error
        finally:
            self._found.close()
            if self._listener is not None:
                self._listener.close()
            for host in self._hosts.values():
                host.link.kill()
        self._printer.close()
        return self._outcome

    def _look(self) -> None:
        """Wait for news, and act on it and on the time."""
        now = time.monotonic()
        times = [now + _FOR_EVER, self._membership.wakes_at(), *(host.lost_at for host in self._hosts.values())]
        times += [self._closes_at, self._ends_at, self._found.looks_at(now)]
        for host in self._hosts.values():
            is_waiting = host.channel.writing in self._selector.get_map()
            if host.channel.has_more and not is_waiting:
                self._selector.register(host.channel.writing, selectors.EVENT_WRITE, host)
            elif is_waiting and not host.channel.has_more:
                self._selector.unregister(host.channel.writing)
        for key, _ in self._selector.select(max(0.0, min(times) - now)):
            if key.fd == self._wake:
                self._note_signals(os.read(self._wake, 512))
            elif key.data.name in self._hosts and self._hosts[key.data.name] is key.data:
                self._serve(key.data, key.fd)
        now = time.monotonic()
        for host in list(self._hosts.values()):
            if now >= host.lost_at:
                host.reason = "it gave no sign of life"
                self._lose(host)
            elif host.is_leaving and not host.is_dismissed and not self._processes_of(host):
                host.dismiss()
                self._say(partial("host {} has left the job".format, host.name))
        if self._outcome.reason is not None:
            if self._closes_at < math.inf and (now >= self._closes_at or not self._processes):
                self._close()
        else:
            for applicant in self._listener.take() if self._listener is not None else []:
                self._admit(applicant)
            if (hosts := self._found.look(now)) is not None:
                self._do(self._membership.hosts_found(now, hosts))
            if now >= self._membership.wakes_at():
                self._do(self._membership.time_passed(now))

    def _serve(self, host: AgentHost, descriptor: int) -> None:
        if descriptor == host.channel.writing:
            with contextlib.suppress(BrokenPipeError):
                host.channel.flush()
        elif descriptor in host.link.errors:
            if not host.read_errors():
                self._selector.unregister(descriptor)
        else:
            try:
                for frame in host.receive(time.monotonic()):
                    self._take(host, frame)
            except EOFError:
                self._lose(host)

    def _take(self, host: AgentHost, frame: Frame) -> None:
        """Act on the news of an agent."""
        number, now = frame.process, time.monotonic()
        if frame.kind in (agent.OUTPUT, agent.ERRORS):
            self._printer.put(partial(self._print, host, frame))
        elif frame.kind == agent.LEAVES:
            host.is_leaving = self._found.has_joined(host.name)
            self._do(self._membership.host_leaves(now, host.name))
        elif number in self._processes and frame.kind == agent.LINE:
            ask = json.loads(frame.payload)
            self._processes[number].address = tuple(ask["address"])
            self._do(self._membership.asked(now, number, ask["steps"], ask["failed"], ask["lost"]))
        elif number in self._processes and frame.kind == agent.ENDED:
            self._note_end(self._processes.pop(number), number, json.loads(frame.payload))

    def _print(self, host: AgentHost, frame: Frame) -> None:
        self._job.output.write(frame.process, "stdout" if frame.kind == agent.OUTPUT else "stderr", frame.payload)
        host.printed += len(frame.payload)

    def _note_end(self, process: HostedProcess, number: int, code: int) -> None:
        code = 128 - code if process.host.is_remote and code > 128 else code  # its worker saw a signal
        if not process.is_dismissed and (not code or self._outcome.reason is None):
            rank = number if process.rank is None else process.rank  # the first processes are numbered as ranks are
            self._outcome.ends.append(ProcessEnd(number, rank, code))
        if code and not process.is_dismissed and self._outcome.reason is None:
            fact = self._job.end_of(number, process.rank, process.host.name, code)
            if process.rank is None:
                self._say(partial(self._job.with_error, f"{fact} before it was ready", number))
            else:
                self._losses.append(partial(self._job.with_error, fact, number))
        self._do(self._membership.ended(time.monotonic(), number, code == 0))

    def _lose(self, host: AgentHost) -> None:
        """Forget a host and its processes, which are dead."""
        del self._hosts[host.name]
        for source in (*host.sources, host.channel.writing):
            if source in self._selector.get_map():
                self._selector.unregister(source)
        with contextlib.suppress(BlockingIOError):
            while host.read_errors():
                pass
        host.link.kill()
        if self._outcome.reason is not None:
            return
        self._found.leave(host.name)
        if not host.is_dismissed:
            ranks = [self._processes.pop(number).rank for number in self._processes_of(host)]
            fact = f"host {host.name} is lost: {host.why()}"
            tell = self._losses.append if any(rank is not None for rank in ranks) else self._say
            tell(lambda: fact)
            self._do(self._membership.host_lost(time.monotonic(), host.name))

    def _processes_of(self, host: AgentHost) -> list[int]:
        return [number for number, process in self._processes.items() if process.host is host]

    def _admit(self, applicant: Applicant) -> None:
        """Let a host join, unless there is another of its name."""
        host = applicant.host
        if host.name in self._hosts or self._found.knows(host.name):
            refuse(applicant.channel, f"the job has a host {host.name} already")
        else:
            self._connect(host.name, JoinedAgent(applicant.channel))
            self._found.join(host)
            self._say(partial("host {} has joined with {}".format, host.name, slots_in_words(host.slots)))

    def _connect(self, name: str, link: StartedAgent | JoinedAgent) -> AgentHost:
        job = self._job
        host = self._hosts[name] = AgentHost(name, link, time.monotonic(), job.deadline, job.options.start_timeout)
        for source in host.sources:
            self._selector.register(source, selectors.EVENT_READ, host)
        return host

    def _note_signals(self, numbers: bytes) -> None:
        for number in numbers:
            if number not in worker.STOP_SIGNALS:
                continue
            if self._outcome.signal is not None:
                self._ends_at = time.monotonic()  # on a second signal
                continue
            self._outcome.signal, self._outcome.reason = number, self._outcome.reason or ""
            if number != signal.SIGTERM:
                self._close()
            else:
                self._stop()

    def _stop(self) -> None:
        """Give the processes time to save their state."""
        self._closes_at = time.monotonic() + self._job.options.stop_grace + ENDING_SECONDS
        for host in self._hosts.values():
            host.send(agent.STOP)

    def _close(self) -> None:
        """Have the agents end what is left of the job."""
        self._closes_at, self._ends_at = math.inf, time.monotonic() + ENDING_SECONDS
        for host in self._hosts.values():
            host.end(self._outcome.verdict())

    def _do(self, actions: list[Action]) -> None:
        """Carry out actions."""
        coming = {action.slot for action in actions if isinstance(action, Start)}
        for action in actions if self._outcome.reason is None else []:
            if isinstance(action, Start):
                self._start(action, coming)
            elif isinstance(action, Form):
                self._form(action)
            elif isinstance(action, Interrupt):
                for number in action.workers:
                    self._tell(number, kind=INTERRUPT, gone=action.gone)
            elif isinstance(action, Dismiss):
                self._processes[action.worker].is_dismissed = True
                self._tell(action.worker, kind=DISMISSAL)
            elif isinstance(action, Kill):
                process = self._processes[action.worker]
                name = self._job.name_of(action.worker, process.rank, process.host.name)
                self._say(partial("{} is killed: {}".format, name, action.reason))
                process.host.send(agent.KILL, action.worker)
            elif isinstance(action, Announce):
                tell = self._losses.append if self._losses else self._say  # in one line with the losses that caused it
                tell(partial(str, action.text))
            elif isinstance(action, EndJob):
                for fact in self._losses:
                    self._say(fact)
                self._outcome.reason = action.reason
                if action.reason and self._job.limits.rescues:
                    self._stop()
                else:
                    self._close()

    def _start(self, start: Start, coming: set[ProcessSlot]) -> None:
        """Start a process; others are started in the slots ``coming``."""
        slot, job = start.slot, self._job
        host = self._hosts.get(slot.host)
        if host is None:
            remote = [] if _is_local(slot.host) else job.ssh.argv(slot.host, AGENT)
            host = self._connect(slot.host, StartedAgent(remote))
        places = {(process.host.name, process.slot) for process in self._processes.values()} | coming
        here = sum(name == slot.host for name, _ in places)
        offer = min(start.worker, len(places) - 1), len(places), slot.number, here
        self._processes[start.worker] = HostedProcess(host, slot.number)
        environment = job.environment_of(slot.host, offer, host.is_remote)
        header = Child(job.options.command, environment, function=job.options.function).header(job.options.stop_grace)
        host.send(agent.START, start.worker, {**header, "is_remote": host.is_remote})

    def _form(self, form: Form) -> None:
        """Send the tickets of a generation."""
        members = [self._processes[number] for number in form.workers]
        if form.generation > 1:
            losses, goes_on = self._losses, f"the job goes on with {len(members)} rank{'s' * (len(members) > 1)}"
            self._say(lambda: "; ".join([*(loss() for loss in losses), goes_on]))
        self._losses, self._outcome.ends = [], []
        self._printer.put(self._job.output.failures.clear)
        places = tuple(
            Member(process.host.name, process.slot, process.address, number)
            for number, process in zip(form.workers, members, strict=True)
        )
        secret = secrets.token_bytes(32)
        for process in self._processes.values():
            process.rank = None
        for rank, (number, process) in enumerate(zip(form.workers, members, strict=True)):
            process.rank = rank
            ticket = Ticket(self._job.name, form.generation, rank, places, secret, form.needs_sync)
            self._tell(number, kind=TICKET, ticket=ticket.to_json())

    def _tell(self, number: int, **message: Any) -> None:
        process = self._processes[number]
        process.host.send(agent.TELL, number, payload=json.dumps(message).encode() + b"\n")

    def _say(self, text: Callable[[], str]) -> None:
        """Print a message behind the output that has come; its words are computed then."""
        self._printer.put(lambda: self._job.say(text()))
