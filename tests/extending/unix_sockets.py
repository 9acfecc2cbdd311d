"""A transport of one's own, in one file: a Unix socket between each two ranks of a host."""

from __future__ import annotations

import socket
import struct
from collections import defaultdict, deque
from time import monotonic, sleep

from hvdkit import transports
from hvdkit.errors import TransportUnavailableError
from hvdkit.transports import Candidate, Job
from hvdkit.transports.base import Bytes, Transfer, Transport

HEADER = struct.Struct("<iQ")  # tag and bytes of a message
RANK = struct.Struct("<i")
CONTROL = -1  # the tag of control messages
AT_ONCE = 1 << 20
CLOSING_SECONDS = 1.0


class UnixTransfer:
    """Done at once for a send, whose bytes are copied; when its message has come for a receive."""

    def __init__(self, transport: UnixSockets, peer: int, buffer: Bytes | None = None) -> None:
        self.peer, self.buffer, self._transport = peer, buffer, transport

    def done(self) -> bool:
        if self.buffer is not None:
            self._transport.move()
        return self.buffer is None

    def take(self, message: bytes) -> None:
        assert self.buffer is not None
        self.buffer.data.cast("B")[:] = message
        self.buffer = None


class UnixSockets(Transport):
    """``prefix``: the same on all ranks of a job, another one in every other job."""

    name = "unix"
    polling = True

    def __init__(self, rank: int, size: int, prefix: str, timeout_seconds: float) -> None:
        self.rank, self.size = rank, size
        self._sockets = meet(rank, size, prefix, timeout_seconds)
        self._incoming = {peer: bytearray() for peer in self._sockets}
        self._outgoing = {peer: bytearray() for peer in self._sockets}
        self._messages: dict[tuple[int, int], deque[bytes]] = defaultdict(deque)
        self._receives: dict[tuple[int, int], deque[UnixTransfer]] = defaultdict(deque)
        self._control: list[tuple[int, bytes]] = []
        self._lost: dict[int, str] = {}

    def isend(self, buffer: Bytes, peer: int, tag: int) -> Transfer:
        self._outgoing[peer] += HEADER.pack(tag, buffer.nbytes) + buffer.tobytes()
        self.move()
        return UnixTransfer(self, peer)

    def irecv(self, buffer: Bytes, peer: int, tag: int) -> Transfer:
        transfer = UnixTransfer(self, peer, buffer)
        self._receives[peer, tag].append(transfer)
        self._match(peer, tag)
        return transfer

    def send_control(self, peer: int, payload: bytes) -> None:
        self._outgoing[peer] += HEADER.pack(CONTROL, len(payload)) + payload
        self.move()

    def poll_control(self) -> list[tuple[int, bytes]]:
        self.move()
        arrived, self._control = self._control, []
        return arrived

    def lost_peers(self) -> dict[int, str]:
        return dict(self._lost)

    def move(self) -> None:
        """Send and receive what the sockets take and have."""
        for peer in self._sockets.keys() - self._lost.keys():
            for way in (self._send, self._receive):
                try:
                    way(peer)
                except BlockingIOError:
                    pass
                except OSError as error:
                    self._outgoing[peer].clear()
                    self._lost[peer] = str(error)

    def _send(self, peer: int) -> None:
        out = self._outgoing[peer]
        while out:
            del out[: self._sockets[peer].send(out[:AT_ONCE])]

    def _receive(self, peer: int) -> None:
        came = self._incoming[peer]
        while part := self._sockets[peer].recv(AT_ONCE):
            came += part
            while len(came) >= HEADER.size and len(came) >= (end := HEADER.size + HEADER.unpack_from(came)[1]):
                tag, message = HEADER.unpack_from(came)[0], bytes(came[HEADER.size : end])
                del came[:end]
                if tag == CONTROL:
                    self._control.append((peer, message))
                else:
                    self._messages[peer, tag].append(message)
                    self._match(peer, tag)
        raise ConnectionError("it closed its connection")

    def _match(self, peer: int, tag: int) -> None:
        receives, messages = self._receives[peer, tag], self._messages[peer, tag]
        while receives and messages:
            receives.popleft().take(messages.popleft())

    def close(self, graceful: bool) -> None:
        deadline = monotonic() + CLOSING_SECONDS
        while any(self._outgoing.values()) and monotonic() < deadline:
            self.move()
        for one in self._sockets.values():
            one.close()

    def abort(self, code: int) -> None:
        """The others notice that connections close."""


def meet(rank: int, size: int, prefix: str, timeout_seconds: float) -> dict[int, socket.socket]:
    """A connection to each other rank: this one listens for the ranks above it."""
    deadline, sockets = monotonic() + timeout_seconds, {}
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{prefix}/{rank}")
        listener.listen(size)
        listener.settimeout(timeout_seconds)
        for peer in range(rank):
            sockets[peer] = socket.socket(socket.AF_UNIX)
            while sockets[peer].connect_ex(f"\0{prefix}/{peer}") != 0:
                if monotonic() > deadline:
                    raise TransportUnavailableError(f"rank {peer} does not listen")
                sleep(0.01)
            sockets[peer].sendall(RANK.pack(rank))
        for _ in range(rank + 1, size):
            connection, _ = listener.accept()
            sockets[RANK.unpack(connection.recv(RANK.size))[0]] = connection
    for one in sockets.values():
        one.setblocking(False)
    return sockets


class OfOneHost(Candidate):
    """Where all ranks are on one host, if it is asked for."""

    name = "unix"

    def unavailable(self, job: Job) -> str | None:
        return None if job.world.local_size == job.world.size else "connects ranks of one host only."

    def open(self, job: Job) -> Transport:
        world = job.world
        prefix = f"hvdkit-tests/{world.job}/{world.rendezvous}/{job.generation}"
        return UnixSockets(world.rank, world.size, prefix, job.start_timeout_seconds)


transports.register(OfOneHost())
