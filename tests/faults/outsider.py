"""Somebody on the network who belongs to no job: finds the ports that one has open, and sends what nobody asked for.

python -m tests.faults.outsider 10.0.0.1 29500        # from another host
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import psutil

ALL_INTERFACES = ("0.0.0.0", "::")  # noqa: S104
PATIENCE_SECONDS = 0.2  # for an answer, which nobody owes an outsider
HELD_CONNECTIONS = 30

NONSENSE = {
    "nothing": b"",
    "noise": os.urandom(4096),
    "zeros": bytes(4096),
    "ones": b"\xff" * 4096,
    "a web browser": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "TLS": bytes.fromhex("16030102000100") * 64,
    # Lengths of what is said to follow, in both orders of bytes, behind each small number that may be a command.
    "oversized": b"".join(struct.pack("<BQ", kind, 1 << 62) + struct.pack(">BQ", kind, 1 << 62) for kind in range(64)),
    "a large message": os.urandom(1 << 20),
    # What Gloo says first on a connection: the number of a pair of ranks.
    "former hellos": b"".join(struct.pack("<q", number) for number in range(16)),
}


@dataclass(frozen=True, order=True)
class Port:
    """Where a process listens."""

    address: str
    number: int
    program: str = ""

    def place(self) -> tuple[str, int]:
        """Where one connects to it on this host."""
        return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.address, self.address), self.number  # noqa: S104


def open_ports(*pids: int) -> list[Port]:
    found = set()
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            one = psutil.Process(pid)
            ask = getattr(one, "net_connections", None) or one.connections  # its name before psutil 6
            for connection in ask(kind="tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    found.add(Port(connection.laddr.ip, connection.laddr.port, one.name()))
    return sorted(found)


def send(port: Port, message: bytes) -> None:
    """Connect, send, look whether something comes, and go away in the middle of it."""
    with contextlib.suppress(OSError), socket.create_connection(port.place(), timeout=5) as connection:
        connection.settimeout(PATIENCE_SECONDS)
        connection.sendall(message)
        connection.recv(4096)


def attack(ports: list[Port], *more: bytes) -> None:
    for port in ports:
        for message in (*NONSENSE.values(), *more):
            send(port, message)


@contextlib.contextmanager
def holding(ports: list[Port]) -> Iterator[None]:
    """Connections that stay open, of which nobody ever says more than a few bytes."""
    with contextlib.ExitStack() as stack:
        for port in ports:
            for number in range(HELD_CONNECTIONS):
                connection = stack.enter_context(socket.create_connection(port.place(), timeout=5))
                with contextlib.suppress(OSError):
                    connection.sendall(bytes(number % 9))
        yield


def main(*places: str) -> None:
    """Attack ports of other hosts, each told as ADDRESS PORT, also while connections to all of them stay open."""
    ports = [Port(address, int(number)) for address, number in zip(places[::2], places[1::2], strict=True)]
    attack(ports)
    with holding(ports):
        attack(ports)


class Recorder:
    """Stands before a port, carries bytes both ways, and keeps those that were sent to it."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets = [self._listener]
        self.port: int = self._listener.getsockname()[1]
        self.heard = bytearray()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                near, _ = self._listener.accept()
                far = self._connect()
                self._sockets += [near, far]
                threading.Thread(target=self._carry, args=(near, far, self.heard), daemon=True).start()
                threading.Thread(target=self._carry, args=(far, near, bytearray()), daemon=True).start()

    def _connect(self) -> socket.socket:
        while True:
            with contextlib.suppress(ConnectionRefusedError):  # rank 0 is not there yet
                return socket.create_connection(self._target)

    def _carry(self, source: socket.socket, target: socket.socket, record: bytearray) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                record += data
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        for one in self._sockets:
            one.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
