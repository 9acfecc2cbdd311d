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

from hvdkit.environments.ticket import Member, Report, Ticket, ticket_of

SECONDS = 60.0  # for an answer of a rank
Answer = dict[str, Any]


class Lines:
    """Lines of JSON over a socket."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._received = b""

    def send(self, **message: Any) -> None:
        self.connection.sendall(json.dumps(message).encode() + b"\n")

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

    def next_ticket(self, address: tuple[str, int], report: Report) -> Ticket:
        self.send(address=address)
        return ticket_of(self.receive()["ticket"])


class Worker(Lines):
    """The launcher's end: a process forked from this one, which runs ``main`` with its Rank."""

    def __init__(self, main: Callable[[Rank], None], host: str, slot: int, others: Iterable[Worker] = ()) -> None:
        ours, theirs = socket.socketpair()
        super().__init__(ours)
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
                main(Rank(theirs))
                status = 0
            except EOFError:
                status = 3  # the launcher has ended
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
            self.add(host, slot)

    def add(self, host: str, slot: int, main: Callable[[Rank], None] | None = None) -> None:
        """Start a worker in a slot of a host, which may run another function than the others."""
        self.workers.append(Worker(main or self._main, host, slot, self.workers))

    def tell(self, **order: Any) -> None:
        for worker in self.workers:
            worker.send(**order)

    def form(self) -> None:
        """Give tickets of the next generation to all workers, which ask for them."""
        self.generation += 1
        addresses = [tuple(worker.receive()["address"]) for worker in self.workers]
        members = tuple(
            Member(worker.host, worker.slot, address, worker.process)
            for worker, address in zip(self.workers, addresses, strict=True)
        )
        secret = secrets.token_bytes(32)
        for rank, worker in enumerate(self.workers):
            worker.send(ticket=Ticket("job", self.generation, rank, members, secret).to_json())

    def reports(self) -> list[Answer]:
        return [worker.receive() for worker in self.workers]

    def lose(self, index: int) -> None:
        """Kill a worker, and forget it."""
        self.workers.pop(index).end()

    def end(self) -> None:
        """Kill all workers."""
        while self.workers:
            self.lose(-1)
