"""A connection for control messages: its buffers, its greeting and its frames."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Generator
from selectors import BaseSelector
from time import monotonic

# Reads a connection: yields how many bytes it needs next, and is sent these.
Reader = Generator[int, bytes, None]

LONGEST_MESSAGE = 1 << 28  # a plan has some hundred bytes for each parameter
AT_ONCE = 1 << 16  # bytes of one system call
FRAME = struct.Struct("<IB")  # the length of the payload, and the kind of the frame
# Kinds of frames: a message; its sender wants to exchange buffers with its receiver.
MESSAGE, PAIR = 0, 1
ADMITTED = FRAME.pack(0, MESSAGE)


class Incoming:
    """The bytes of a connection that its reader has not taken yet."""

    def __init__(self) -> None:
        self.ended = False
        self._received = bytearray()
        self._reader: Reader
        self._wants = 0  # the bytes that the reader needs

    def read_with(self, reader: Reader) -> None:
        """Let ``reader`` read all that comes from now on."""
        self._received.clear()
        self._reader = reader
        self._wants = next(reader)

    def feed(self, data: bytes) -> None:
        """Let the reader read ``data``. Raises NotAuthenticError for bytes that no rank of the session sends."""
        self._received += data
        while not self.ended and len(self._received) >= self._wants:
            part = bytes(self._received[: self._wants])
            del self._received[: self._wants]
            self._wants = self._reader.send(part)


class Link(Incoming):
    """A connection to a rank, with the bytes that wait to be sent."""

    def __init__(self, peer: int = -1) -> None:
        super().__init__()
        self.peer = peer  # -1: no rank has proven itself yet
        self.since = monotonic()
        self.is_needless = False  # its end is no loss
        self.broke: OSError | None = None
        self.greeted = False
        self.socket: socket.socket | None = None
        self.lock = threading.Lock()  # the engine and the thread of the connections both send
        self.greeting, self.unsent = bytearray(), bytearray()

    def send_some(self) -> None:
        """Send as much as the socket takes, under the lock. The receiving thread reports how the connection broke."""
        if self.socket is None:
            return
        try:
            for out in (self.greeting, self.unsent) if self.greeted else (self.greeting,):
                while out:
                    del out[: self.socket.send(out[:AT_ONCE])]
        except BlockingIOError:
            return
        except OSError as error:
            self.broke = self.broke or error
            self.greeting.clear()
            if self.greeted:  # otherwise the connection may be made again
                self.unsent.clear()

    def receive_some(self) -> bytes | None:
        """Return bytes that have come, b"" at the end of the connection, None if there are none yet."""
        assert self.socket is not None
        try:
            return self.socket.recv(AT_ONCE)
        except BlockingIOError:
            return None
        except OSError as error:
            self.broke = self.broke or error  # the system reports an error once: the sender's counts before this
            return b""

    def close(self, selector: BaseSelector) -> None:
        """Close the socket, under the lock."""
        if self.socket is not None:
            selector.unregister(self.socket)
            self.socket.close()
            self.socket = None


def dialled(host: str, port: int) -> socket.socket:
    """Return a connection that is being made. Raises OSError, also where this process has too many files."""
    connection = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            connection.connect((host, port))
    except OSError:
        connection.close()
        raise
    return connection


def receive(connection: socket.socket, nbytes: int) -> bytes:
    """Receive exactly ``nbytes`` bytes. Raises OSError where the connection ends before."""
    received = bytearray()
    while len(received) < nbytes:
        data = connection.recv(nbytes - len(received))
        if not data:
            raise ConnectionResetError("the connection was closed")
        received += data
    return bytes(received)
