"""MPI carries the bytes, through mpi4py: nonblocking calls on communicators of our own, polled by the engine."""

from __future__ import annotations

import logging
from collections import deque
from typing import Any

from hvdkit.errors import PeerLostError, TransportUnavailableError
from hvdkit.transports.base import Bytes, Transfer, Transport

logger = logging.getLogger("hvdkit")

# MPI counts are C ints; a larger buffer travels as several messages, which MPI delivers in order.
LARGEST_MESSAGE = 1 << 30
CONTROL_TAG = 0


class MpiTransfer:
    """The MPI requests of one buffer."""

    __slots__ = ("_buffer", "_requests", "peer")

    def __init__(self, buffer: Bytes, requests: list[Any], peer: int) -> None:
        self._buffer = buffer  # MPI reads or writes it until the requests are done
        self._requests = requests
        self.peer = peer

    def done(self) -> bool:
        try:
            while self._requests:
                if not self._requests[-1].Test():
                    return False
                self._requests.pop()
        except Exception as error:
            raise PeerLostError(f"MPI lost the connection to rank {self.peer}: {error}", self.peer) from error
        return True


class MpiTransport(Transport):
    """Ranks of an MPI communicator. Construction is collective: every rank of ``communicator`` takes part."""

    name = "mpi"
    polling = True

    def __init__(self, communicator: Any = None) -> None:
        from mpi4py import MPI

        if MPI.Is_finalized():
            raise TransportUnavailableError("MPI has been finalized in this process and cannot be started again.")
        world = MPI.COMM_WORLD if communicator is None else communicator
        self._mpi = MPI
        self._data = world.Dup()
        self._control = world.Dup()
        self.rank = self._data.Get_rank()
        self.size = self._data.Get_size()
        self._outbox: deque[Any] = deque()  # control sends under way, with their payloads
        self._inbox: deque[tuple[int, bytearray, Any]] = deque()  # control receives under way
        if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
            raise TransportUnavailableError(
                "MPI was started without thread support, and hvdkit drives it from a thread of its own.\n"
                "HINT: let mpi4py start MPI (its default is MPI_THREAD_MULTIPLE), or set HVDKIT_TRANSPORT=torch."
            )

    def isend(self, buffer: Bytes, peer: int, tag: int) -> Transfer:
        return MpiTransfer(
            buffer, [self._data.Isend([part, self._mpi.BYTE], peer, tag) for part in _parts(buffer)], peer
        )

    def irecv(self, buffer: Bytes, peer: int, tag: int) -> Transfer:
        return MpiTransfer(
            buffer, [self._data.Irecv([part, self._mpi.BYTE], peer, tag) for part in _parts(buffer)], peer
        )

    def send_control(self, peer: int, payload: bytes) -> None:
        request = self._control.Isend([payload, self._mpi.BYTE], peer, CONTROL_TAG)
        if not request.Test():
            self._outbox.append((request, payload))

    def poll_control(self) -> list[tuple[int, bytes]]:
        for _ in range(len(self._outbox)):
            if self._outbox[0][0].Test():
                self._outbox.popleft()
            else:
                self._outbox.rotate(-1)
        status = None
        while True:
            status = status or self._mpi.Status()
            message = self._control.Improbe(self._mpi.ANY_SOURCE, CONTROL_TAG, status)
            if message is None:
                break
            payload = bytearray(status.Get_count(self._mpi.BYTE))
            self._inbox.append((status.Get_source(), payload, message.Irecv([payload, self._mpi.BYTE])))
        arrived = []
        # In order of arrival: a long message may hold back a short one behind it, never be overtaken by it.
        while self._inbox and self._inbox[0][2].Test():
            source, payload, _ = self._inbox.popleft()
            arrived.append((source, bytes(payload)))
        return arrived

    def close(self, graceful: bool) -> None:
        if not graceful or self._mpi.Is_finalized():
            return  # freeing is collective: without the others it could block
        for request, _ in self._outbox:
            request.Wait()
        self._outbox.clear()
        self._data.Free()
        self._control.Free()

    def abort(self, code: int) -> None:
        if not self._mpi.Is_finalized():
            self._mpi.COMM_WORLD.Abort(code)


def _parts(buffer: Bytes) -> list[Bytes]:
    if buffer.nbytes <= LARGEST_MESSAGE:
        return [buffer]
    return [buffer[start : start + LARGEST_MESSAGE] for start in range(0, buffer.nbytes, LARGEST_MESSAGE)]
