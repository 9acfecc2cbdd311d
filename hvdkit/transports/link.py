"""A connection for control messages: its buffers, its greeting and its frames."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Generator
from time import monotonic

# Reads a connection: yields how many bytes it needs next, and is sent these.
Reader = Generator[int, bytes, None]

LONGEST_MESSAGE = 1 << 28  # a plan has some hundred bytes for each parameter
AT_ONCE = 1 << 16  # bytes of one system call
FRAME = struct.Struct("<IB")  # the length of the payload, and the kind of the frame
# Kinds of frames: a message; its sender wants to exchange buffers with its receiver.
MESSAGE, PAIR = 0, 1
ADMITTED = FRAME.pack(0, MESSAGE)


class Link:
    """A connection to a rank, with the bytes that wait to be sent and those that are no whole frame yet."""

    def __init__(self, peer: int = -1) -> None:
        self.peer = peer  # -1: no rank has proven itself yet
        self.since = monotonic()
        self.is_needless = False  # its end is no loss
        self.broke: OSError | None = None
        self.greeted = False
        self.ended = False
        self.socket: socket.socket | None = None
        self.lock = threading.Lock()  # the engine and the thread of the connections both send
        self.greeting, self.unsent = bytearray(), bytearray()
        self.received = bytearray()
        self.reader: Reader
        self.wants = 0  # the bytes that the reader needs

    def read_with(self, reader: Reader) -> None:
        """Let ``reader`` read what comes from now on."""
        self.reader = reader
        self.wants = next(reader)

    def feed(self, data: bytes) -> None:
        """Let the reader read ``data``. Raises NotAuthenticError for bytes that no rank of the session sends."""
        self.received += data
        while not self.ended and len(self.received) >= self.wants:
            part = bytes(self.received[: self.wants])
            del self.received[: self.wants]
            self.wants = self.reader.send(part)

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

    def has_more(self) -> bool:
        """True if something could be sent as soon as the socket takes it."""
        return bool(self.greeting or (self.greeted and self.unsent))


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
