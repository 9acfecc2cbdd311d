"""The port at which hosts join an elastic job (``hvdkitrun --listen``), and the file of the secret that they know."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import NamedTuple

import hvdkit
from hvdkit.environments import network
from hvdkit.errors import EnvironmentConflictError
from hvdkit.launch import LaunchError, UsageError
from hvdkit.launch.elastic.agent import END
from hvdkit.launch.elastic.sealed import SealedChannel, prove
from hvdkit.launch.hosts import Host, parse_hosts
from hvdkit.transports.security.credentials import NotAuthenticError

GREETING_SECONDS = 10.0  # in which a process that has connected proves that it knows the secret, and says its name
MOST_STRANGERS = 64  # connections without a proof; the oldest is ended for another one
MOST_TOLD = 100  # addresses of strangers of which the user is told
ACCEPTING_PAUSE = 0.1  # seconds, after accept() failed
REFUSAL_READS = 5  # of a second, in which a host that is refused reads why and ends


class Applicant(NamedTuple):
    """A host that knows the secret and wants to join."""

    host: Host
    channel: SealedChannel


class Listener:
    """The port at which hosts join. Each connection is greeted on a thread of its own, so that none holds up the job.

    ``wake`` is called when there is an applicant, ``say`` with a line about each address of strangers.
    """

    def __init__(
        self, address: tuple[str, int], secret: bytes, wake: Callable[[], object], say: Callable[[str], object]
    ) -> None:
        self._secret, self._wake, self._say = secret, wake, say
        self._applicants: SimpleQueue[Applicant] = SimpleQueue()
        self._strangers: list[socket.socket] = []  # in the order of their coming
        self._told: set[str] = set()
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        try:
            self._socket = socket.create_server(address, family=family)
        except OSError as error:
            hint = "choose another port, or 0 for a free one, and an address of this host"
            where = f"{address[0]} port {address[1]}"
            raise LaunchError(f"cannot listen on {where}: {error.strerror}\nHINT: {hint}") from error
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        threading.Thread(target=self._accept, name="hvdkitrun-listen", daemon=True).start()

    def take(self) -> list[Applicant]:
        """Return the hosts that have come since the last call."""
        return [self._applicants.get() for _ in range(self._applicants.qsize())]

    def close(self) -> None:
        """Let no other host come."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # which ends accept()
        self._socket.close()
        for applicant in self.take():
            refuse(applicant.channel, "the job has ended")

    def _accept(self) -> None:
        while True:
            try:
                connection, address = self._socket.accept()
            except OSError:  # the peer has gone away, or there are too many files
                if self._socket.fileno() < 0:
                    return
                time.sleep(ACCEPTING_PAUSE)
                continue
            if len(self._strangers) >= MOST_STRANGERS:
                with contextlib.suppress(OSError):
                    self._strangers[0].shutdown(socket.SHUT_RDWR)
            self._strangers.append(connection)
            threading.Thread(target=self._greet, args=(connection, address[0]), daemon=True).start()

    def _greet(self, connection: socket.socket, address: str) -> None:
        try:
            channel = prove(connection, self._secret, True, GREETING_SECONDS)
        except (NotAuthenticError, OSError):
            connection.close()
            if address not in self._told and len(self._told) < MOST_TOLD:
                self._told.add(address)
                self._say(f"a process on {address} connected, but did not prove that it knows the secret")
            return
        finally:
            self._strangers.remove(connection)
        try:
            frame, *_ = channel.wait(GREETING_SECONDS)
            facts = json.loads(frame.payload)
            (host,) = parse_hosts(f"{facts['name']}:{facts['slots']}")
        except (EOFError, ValueError, KeyError, UsageError):  # it has ended meanwhile
            channel.close()
            return
        if (version := facts.get("version")) != hvdkit.__version__:
            refuse(channel, f"it has hvdkit {version}, but the job has {hvdkit.__version__}")
            return
        self._applicants.put(Applicant(host, channel))
        self._wake()


def refuse(channel: SealedChannel, reason: str) -> None:
    """Tell a host why it cannot join, and close the connection when the host has read that."""

    def tell() -> None:
        with contextlib.suppress(BrokenPipeError, EOFError):
            channel.send(END, payload=json.dumps([1, f"this host cannot join: {reason}"]).encode())
            for _ in range(REFUSAL_READS):  # closing now would discard the message if more has come from there
                channel.wait(1.0)
        channel.close()

    threading.Thread(target=tell, name="hvdkitrun-refuse", daemon=True).start()


def read_secret(path: str, may_create: bool) -> bytes:
    """Return the secret in a file, which is made if it ``may_create`` one. Raises UsageError."""
    if may_create:
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            pass
        except OSError as error:
            hint = "name a file in a folder that is yours"
            raise UsageError(f"cannot make the secret {path}: {error.strerror}\nHINT: {hint}") from error
        else:
            with os.fdopen(descriptor, "w") as file:
                file.write(secrets.token_hex(32) + "\n")
    try:
        secret = network.job_secret({"HVDKIT_SECRET_FILE": path})
    except EnvironmentConflictError as error:
        raise UsageError(str(error).replace("HVDKIT_SECRET_FILE=", "in --secret-file ")) from error
    assert secret is not None
    return secret
