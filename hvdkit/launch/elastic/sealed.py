"""The connection of a host that joins an elastic job by itself: both ends prove that they know a secret.

The handshake is that of ranks (``transports/security/credentials``), and nothing else is read before it. Its bytes give
a key of this connection alone. Every later frame ends with a tag of that key, which covers the direction and the number
of the frame, so that a frame that was changed, left out, repeated or invented is found. Frames are not encrypted.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import select
import socket
import struct
from collections.abc import Generator
from time import monotonic

from hvdkit.launch.elastic.agent import Channel, Frame
from hvdkit.transports.security.credentials import HELLO_BYTES, TAG_BYTES, Credentials, initiate, respond

_LAUNCHER, _HOST = 0, 1  # their numbers in the handshake
_HEADER = struct.Struct("!QBI")  # the number of a frame, its kind and process


class SealedChannel(Channel):
    """Frames over a connection, with tags. The end of ``is_launcher`` sends orders, and the other one news.

    ``receive`` raises EOFError if the connection is broken, or a frame is not authentic.
    """

    def __init__(self, connection: socket.socket, key: Credentials, is_launcher: bool) -> None:
        self._connection, self._key = connection, key
        self._own, self._others = ("order", "news") if is_launcher else ("news", "order")
        self._sent = self._taken = 0  # frames
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        super().__init__(connection.fileno(), os.dup(connection.fileno()))  # a selector watches each number once

    def send(self, kind: int, process: int = 0, payload: bytes = b"") -> None:
        tag = self._key.tag(self._own, _HEADER.pack(self._sent, kind, process), payload)
        self._sent += 1
        super().send(kind, process, payload + tag)

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            raise BrokenPipeError(error.strerror) from error

    def receive(self) -> list[Frame]:
        try:
            return [self._open(*frame) for frame in super().receive()]
        except OSError as error:
            raise EOFError from error

    def wait(self, seconds: float) -> list[Frame]:
        """Return frames as soon as there are any, an empty list if none have come for so long."""
        poll = select.poll()
        poll.register(self.reading, select.POLLIN)
        return self.receive() if poll.poll(1000 * seconds) else []

    def _open(self, kind: int, process: int, sealed: bytes) -> Frame:
        payload, tag = sealed[:-TAG_BYTES], sealed[-TAG_BYTES:]
        if not hmac.compare_digest(tag, self._key.tag(self._others, _HEADER.pack(self._taken, kind, process), payload)):
            raise EOFError
        self._taken += 1
        return Frame(kind, process, payload)

    def close(self) -> None:
        """Close the connection. Further frames raise BrokenPipeError."""
        if self._connection.fileno() >= 0:
            with contextlib.suppress(OSError):  # the other end may have closed it
                self._connection.shutdown(socket.SHUT_RDWR)
            self._connection.close()
            os.close(self.writing)
            self.writing = -1


def prove(connection: socket.socket, secret: bytes, is_launcher: bool, seconds: float) -> SealedChannel:
    """Prove to the other end that this one knows the secret, and have it prove the same. Return the channel of frames.

    Raises NotAuthenticError if the other end does not know the secret, OSError if it ends or is silent for so long.
    """
    credentials, deadline = Credentials(secret, "hvdkitrun", 0), monotonic() + seconds
    transcript: list[bytes] = []

    def send(data: bytes) -> None:
        transcript.append(data)
        connection.sendall(data)

    def receive(nbytes: int) -> bytes:
        data = b""
        while len(data) < nbytes:
            connection.settimeout(max(0.001, deadline - monotonic()))
            if not (more := connection.recv(nbytes - len(data))):
                raise ConnectionResetError("it closed the connection")
            data += more
        transcript.append(data)
        return data

    steps: Generator[int, bytes, object]
    if is_launcher:
        steps = respond(credentials, _LAUNCHER, 2, receive(HELLO_BYTES), send)
    else:
        steps = initiate(credentials, _HOST, _LAUNCHER, send)
    wanted = next(steps)
    with contextlib.suppress(StopIteration):
        while True:
            wanted = steps.send(receive(wanted))
    return SealedChannel(connection, credentials.for_session(transcript), is_launcher)
