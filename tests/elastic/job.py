"""An elastic job on this machine: forked ranks, and a launcher that tells them their generations by tickets."""

from __future__ import annotations

import json
import os
import secrets
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hvdkit.environments.base import World
from hvdkit.environments.ticket import LAUNCHER, Member, Report, Ticket, ticket_of

SECONDS = 60.0  # for an answer of a rank
Answer = dict[str, Any]


class Lines:
    """Lines of JSON over a socket."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._received = b""

    def send(self, **message: Any) -> None:
        self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receives_now(self) -> bool:
        """True if a message has come, or begins to."""
        return bool(self._received or select.select([self.connection], [], [], 0.0)[0])

    def receive(self, seconds: float = SECONDS) -> Answer:
        """Return the next message. Raises EOFError where the other end is gone, TimeoutError."""
        deadline = time.monotonic() + seconds
        while b"\n" not in self._received:
            if not select.select([self.connection], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError(f"no answer for {seconds:g} s")
            data = self.connection.recv(1 << 16)
            if not data:
                raise EOFError
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        return dict(json.loads(line))


class Rank(Lines):
    """A rank's end: it is the launcher for the rank, brings it orders, and takes its reports."""

    addresses: list[str] = ["127.0.0.1"]  # noqa: RUF012 (the same for all)

    def __init__(self, connection: socket.socket, offer: World) -> None:
        super().__init__(connection)
        self.offer = offer
        self.order: Answer = {}  # that came with the last ticket
        self.facts: Answer = {}  # to tell with each question for a ticket
        self._is_interrupted = False

    def next_ticket(self, address: tuple[str, int], report: Report) -> Ticket:
        self.send(address=address, steps=report.steps, failed=report.failed, **self.facts)
        while "ticket" not in (message := self.receive()):
            if "dismissal" in message:
                raise SystemExit(0)
        self._is_interrupted, self.order = False, message
        return ticket_of(message["ticket"])

    def is_interrupted(self) -> bool:
        """True if the launcher wants this process to ask for the next ticket."""
        while not self._is_interrupted and self.receives_now():
            self._is_interrupted = self.receive()["interrupt"]
        return self._is_interrupted


class Worker(Lines):
    """The launcher's end: a process forked from this one, which runs ``main`` with its Rank."""

    def __init__(self, main: Callable[[Rank], None], offer: World, others: Iterable[Worker] = ()) -> None:
        ours, theirs = socket.socketpair()
        super().__init__(ours)
        host, slot = str(offer.host), offer.local_rank
        self.host, self.slot = host, slot
        self._status: int | None = None  # once it has ended
        sys.stdout.flush()
        sys.stderr.flush()
        self.process = os.fork()
        if self.process == 0:
            status = 1
            try:
                for other in (self, *others):
                    other.connection.close()
                main(Rank(theirs, offer))
                status = 0
            except EOFError:
                status = 3  # the launcher has ended
            except SystemExit as end:
                status = int(end.code or 0)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        theirs.close()

    def end(self, number: int = signal.SIGKILL) -> None:
        """Send a signal, and wait for the end of the process."""
        if self._status is None:
            os.kill(self.process, number)
        self.wait()

    def wait(self) -> int:
        """Wait for the end of the process, and return its exit status."""
        if self._status is None:
            self._status = os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])
            self.connection.close()
        return self._status


def newness(ask: Answer) -> int:
    """Return the steps that the state of a worker has seen, -1 if it has no state."""
    return -1 if ask["steps"] is None else int(ask["steps"])


_jobs: list[ElasticJob] = []


def run(scenario: Callable[[], None]) -> None:
    """Run a scenario, and kill all workers that it leaves behind, as after an error."""
    try:
        scenario()
    finally:
        for job in _jobs:
            job.end()


class ElasticJob:
    """The workers of a job, and the number of its generation."""

    def __init__(self, main: Callable[[Rank], None], places: Sequence[tuple[str, int]]) -> None:
        self._main = main
        self.generation = 0
        self.workers: list[Worker] = []
        _jobs.append(self)
        for host, slot in places:
            self.add(host, slot, size=len(places))

    def add(self, host: str, slot: int, main: Callable[[Rank], None] | None = None, size: int = 0) -> None:
        """Start a worker in a slot of a host, which may run another function than the others.

        It is offered the last rank, of ``size`` ranks or of those that there are then.
        """
        rank = len(self.workers)
        offer = World(LAUNCHER, rank, size or rank + 1, slot, size or rank + 1, host=host)
        self.workers.append(Worker(main or self._main, offer, self.workers))

    def tell(self, **order: Any) -> None:
        for worker in self.workers:
            worker.send(**order)

    def form(
        self, killed: Worker | None = None, asked: dict[Worker, Answer] | None = None, **order: Any
    ) -> list[Answer]:
        """Give tickets of the next generation to all workers, which ask for them, and return what they asked.

        A worker with the newest state becomes rank 0. ``killed``: a worker that dies after the tickets are written.
        ``asked``: what the workers have asked, if it was received before.
        """
        self.generation += 1
        received = {worker: worker.receive() if asked is None else asked[worker] for worker in self.workers}
        self.workers.sort(
            key=lambda worker: received[worker]["steps"] != max(map(newness, received.values()), default=-1)
        )
        members = tuple(
            Member(worker.host, worker.slot, tuple(received[worker]["address"]), worker.process)
            for worker in self.workers
        )
        needs_sync = any(ask["failed"] for ask in received.values()) or len(set(map(newness, received.values()))) > 1
        secret = secrets.token_bytes(32)
        if killed is not None:
            killed.end()
        for rank, worker in enumerate(self.workers):
            ticket = Ticket("job", self.generation, rank, members, secret, needs_sync or self.generation == 1)
            if worker is not killed:
                worker.send(ticket=ticket.to_json(), **order)
        if killed is not None:
            self.workers.remove(killed)
        return list(received.values())

    def reports(self) -> list[Answer]:
        return [worker.receive() for worker in self.workers]

    def lose(self, index: int) -> None:
        """Kill a worker, and forget it."""
        self.workers.pop(index).end()

    def end(self) -> None:
        """Kill all workers."""
        while self.workers:
            self.lose(-1)
