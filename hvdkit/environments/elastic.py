"""The connection of a process of an elastic job to ``hvdkitrun``, which starts it with one end of a socket.

Lines of JSON travel over it: a process asks for a ticket, and gets a ticket or its dismissal. Interrupts may come
between a ticket and the next question; they name members that are gone, for which ranks that still connect need not
wait. At the other end is ``launch/elastic/agent``. Nothing but this process and its children has the socket.
"""

from __future__ import annotations

import json
import os
import select
import socket
import stat
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from hvdkit.environments.base import World, integer
from hvdkit.environments.network import interface_address, named_interfaces
from hvdkit.environments.ticket import LAUNCHER, Report, Ticket, ticket_of
from hvdkit.errors import TransportUnavailableError

SOCKET, ADDRESS = "HVDKIT_ELASTIC_SOCKET", "HVDKIT_ELASTIC_ADDRESS"
HOST = "HOROVOD_HOSTNAME"
TICKET, INTERRUPT, DISMISSAL = "ticket", "interrupt", "dismissal"


class ElasticLauncher:
    """The launcher of an elastic job, as a process of the job sees it.

    ``offer``: the place that the process may expect in its first generation. ``addresses``: those of this host at which
    other hosts of the job reach it.
    """

    def __init__(self, connection: socket.socket, environ: Mapping[str, str]) -> None:
        self._connection, self._received = connection, b""
        rank, size, local_rank, local_size = (
            integer(environ, f"HOROVOD_{name}") for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
        )
        self.offer = World(LAUNCHER, rank, size, local_rank, local_size, host=environ.get(HOST))
        self.addresses = [interface_address(name) for name in named_interfaces(environ)] or [environ[ADDRESS]]
        self._is_interrupted = False
        self._gone: set[int] = set()  # processes of the present generation

    def next_ticket(self, address: tuple[str, int], report: Report) -> Ticket:
        """Tell where this process listens, and wait for the ticket of the next generation.

        Raises SystemExit with 0 if the job does not need this process any more, TransportUnavailableError if hvdkitrun
        has ended.
        """
        ask = {"kind": "ask", "address": address, **report._asdict()}
        try:
            self._connection.sendall(json.dumps(ask).encode() + b"\n")
        except OSError as error:
            raise _gone() from error
        while True:
            message = self._next_message(None)
            assert message is not None
            if message["kind"] == TICKET:
                self._is_interrupted, self._gone = False, set()
                ticket = ticket_of(message["ticket"])
                return replace(ticket, lost_ranks=partial(self._lost_ranks, ticket))
            if message["kind"] == DISMISSAL:
                raise SystemExit(0)

    def is_interrupted(self) -> bool:
        """True if the launcher wants this process to ask, since processes are ready to join or some must leave."""
        self._read_interrupts()
        return self._is_interrupted

    def _lost_ranks(self, ticket: Ticket) -> Collection[int]:
        self._read_interrupts()
        return [rank for rank, member in enumerate(ticket.members) if member.process in self._gone]

    def _read_interrupts(self) -> None:
        """Note the interrupts that have come. Nothing else comes between a ticket and the next question."""
        while (message := self._next_message(0.0)) is not None:
            self._is_interrupted = True
            self._gone.update(message["gone"])

    def _next_message(self, seconds: float | None) -> dict[str, Any] | None:
        """Return the next message, None if none has come for so long. Raises TransportUnavailableError."""
        while b"\n" not in self._received:
            if not select.select([self._connection], [], [], seconds)[0]:
                return None
            try:
                data = self._connection.recv(1 << 16)
            except OSError as error:
                raise _gone() from error
            if not data:
                raise _gone()
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message


def _gone() -> TransportUnavailableError:
    return TransportUnavailableError("hvdkitrun, which started this process, has ended, and with it the elastic job.")


_launcher: ElasticLauncher | None = None


def launcher() -> ElasticLauncher | None:
    """Return the launcher of the elastic job of this process, None if it is in no such job.

    The first call takes the socket, which programs that this process starts do not inherit then.
    """
    global _launcher
    number = os.environ.pop(SOCKET, None)
    if number is not None:
        descriptor = int(number)
        try:
            is_socket = stat.S_ISSOCK(os.fstat(descriptor).st_mode)
        except OSError:
            is_socket = False
        if is_socket:
            os.set_inheritable(descriptor, False)
            _launcher = ElasticLauncher(socket.socket(fileno=descriptor), os.environ)
    return _launcher
