"""Memory that the ranks of a node share: an anonymous file that the lowest rank makes and hands to the other ranks.

A memory file (memfd) needs no /dev/shm, so a container's 64 MB limit does not apply. No other user can open it, and
nothing is left behind however the ranks end. Its descriptor is sent over an abstract socket, with those of the ranks'
arenas, to processes of the same user that show a secret which they got over the transport. Each rank holds a lock on
one byte of the file; the kernel drops the lock when the process ends, so the other ranks notice the end.
"""

from __future__ import annotations

import errno
import fcntl
import hmac
import os
import secrets
import socket
import struct
from collections.abc import Callable, Iterable
from contextlib import suppress
from time import monotonic

from hvdkit.kernels._native import Window
from hvdkit.transports.node import SEGMENT_BYTES, SEGMENTS, has_segment

FILE_BYTES = SEGMENTS * SEGMENT_BYTES  # sparse: addresses cost nothing

LOOK_SECONDS = 0.05  # between two looks whether a guest is lost
GREETING_SECONDS = 1.0  # a process that has connected must show the secret within this time
MOST_DESCRIPTORS = 250  # in a message over a socket

_INDEX = struct.Struct("<I")
_FLOCK = struct.Struct("hhqqi4x")  # struct flock on 64-bit Linux


class NodeMemory:
    """The open file, and this rank's index among the ``count`` ranks that have it."""

    def __init__(self, descriptor: int, index: int, count: int) -> None:
        self.index, self.count, self._descriptor = index, count, descriptor
        self._in_advance: dict[tuple[int, int], Window] = {}
        # A POSIX lock: children that outlive this process do not inherit it, as they would a lock of the newer kind.
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, index, os.SEEK_SET)

    def window(self, segment: int, nbytes: int) -> Window:
        """Map the first bytes of a segment, which are zeros until a rank writes to them. Raises OSError."""
        if (window := self._in_advance.pop((segment, nbytes), None)) is not None:
            return window
        if nbytes > SEGMENT_BYTES:
            raise OSError(errno.EFBIG, f"{nbytes} bytes in one segment", None)
        if not has_segment(segment):
            raise OSError(errno.ENOSPC, f"all {SEGMENTS} segments were used", None)
        return Window(self._descriptor, segment * SEGMENT_BYTES, nbytes)

    def map_in_advance(self, segment: int, nbytes: int) -> None:
        """Map a window that is needed later, while the job can still do without shared memory. Raises OSError."""
        self._in_advance[segment, nbytes] = self.window(segment, nbytes)

    def populate(self, window: Window, segment: int, begin: int, nbytes: int) -> None:
        """Allocate a part of a window, since a write without memory would end the process. Raises OSError."""
        if not window.populate(begin, nbytes):  # this kernel can only reserve it
            os.posix_fallocate(self._descriptor, segment * SEGMENT_BYTES + begin, nbytes)

    def gone(self) -> list[int]:
        """Return the ranks (by index) whose process has ended or closed this memory."""
        others = [index for index in range(self.count) if index != self.index]
        queries = [_FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, index, 1, 0) for index in others]
        answers = [_FLOCK.unpack(fcntl.fcntl(self._descriptor, fcntl.F_GETLK, query)) for query in queries]
        return [index for index, answer in zip(others, answers, strict=True) if answer[0] == fcntl.F_UNLCK]

    def close(self) -> None:
        """Close the file; each window stays mapped as long as it is referenced."""
        self._in_advance.clear()
        os.close(self._descriptor)
        self._descriptor = -1


class Invitation:
    """The memory of a node on the rank that makes it. Construction raises OSError if this host cannot make it."""

    def __init__(self) -> None:
        self.secret = secrets.token_hex(32)
        self.address = f"hvdkit-{secrets.token_hex(16)}"
        self._descriptor = os.memfd_create("hvdkit", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self._descriptor, FILE_BYTES)
            # An abstract address exists only in this network namespace and vanishes with the socket.
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._listener.bind(f"\0{self.address}")
            self._listener.listen(128)
        except OSError:
            os.close(self._descriptor)
            raise

    def serve(
        self, guests: int, seconds: float, arena: int = -1, is_hopeless: Callable[[], bool] = lambda: False
    ) -> tuple[int, dict[int, int]]:
        """Hand the memory to ``guests`` processes that know the secret, and return its descriptor.

        All ranks also get the descriptors of all arenas, by index; this rank's is ``arena``, -1 for none. The caller
        owns all descriptors. Raises TimeoutError, an OSError, if not all guests come in time, or ``is_hopeless()``
        says before that a guest will not come.
        """
        deadline = monotonic() + seconds
        arrived: list[socket.socket] = []
        arenas = {} if arena < 0 else {0: os.dup(arena)}
        try:
            while len(arrived) < guests:
                self._listener.settimeout(LOOK_SECONDS)
                try:
                    connection, _ = self._listener.accept()
                except TimeoutError:
                    if monotonic() > deadline or is_hopeless():
                        raise
                    continue
                # A process that shows nothing, or goes away, must not fail the other guests.
                connection.settimeout(GREETING_SECONDS)
                index, descriptor = self._greeted(connection)
                if index is None:
                    connection.close()
                else:
                    arrived.append(connection)
                    if descriptor >= 0:
                        arenas[index] = descriptor
            if len(arenas) >= MOST_DESCRIPTORS:
                _close_all(arenas.values())
                arenas = {}
            offer = struct.pack(f"<{len(arenas)}I", *arenas)
            for connection in arrived:
                socket.send_fds(connection, [b"!" + offer], [self._descriptor, *arenas.values()])
        except OSError:
            _close_all(arenas.values())
            self.withdraw()
            raise
        finally:
            for connection in arrived:
                connection.close()
        self._listener.close()
        return self._descriptor, arenas

    def _greeted(self, connection: socket.socket) -> tuple[int | None, int]:
        """Return the index of a guest that knows the secret, else None, and the descriptor of its arena, or -1."""
        expected = len(self.secret) + _INDEX.size
        shown, descriptors = b"", []
        with suppress(OSError):
            while _same_user(connection) and len(shown) < expected:
                part, more, _, _ = socket.recv_fds(connection, expected - len(shown), 1)
                descriptors += more
                if not part:
                    break
                shown += part
        if len(shown) == expected and hmac.compare_digest(shown[: len(self.secret)], self.secret.encode()):
            for descriptor in descriptors:
                os.set_inheritable(descriptor, False)
            return _INDEX.unpack(shown[len(self.secret) :])[0], descriptors[0] if descriptors else -1
        _close_all(descriptors)
        return None, -1

    def withdraw(self) -> None:
        """Give the memory up without serving any guest."""
        self._listener.close()
        os.close(self._descriptor)


def fetch(address: str, secret: str, seconds: float, index: int, arena: int = -1) -> tuple[int, dict[int, int]]:
    """Fetch the descriptor of the memory that another rank of this node made, and those of all arenas, by index.

    ``arena`` is the descriptor of this rank's arena, -1 for none. Raises OSError.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(seconds)
        connection.connect(f"\0{address}")
        if not _same_user(connection):
            raise PermissionError("the memory that was offered belongs to another user")
        greeting = secret.encode() + _INDEX.pack(index)
        sent = socket.send_fds(connection, [greeting], [] if arena < 0 else [arena])
        if sent < len(greeting):
            connection.sendall(greeting[sent:])
        offer, descriptors, _, _ = socket.recv_fds(connection, 1 + 4 * MOST_DESCRIPTORS, MOST_DESCRIPTORS)
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    if len(offer) != 1 + 4 * (len(descriptors) - 1):
        _close_all(descriptors)
        raise ConnectionError("no memory came over the connection")
    return descriptors[0], dict(
        zip(struct.unpack(f"<{len(descriptors) - 1}I", offer[1:]), descriptors[1:], strict=True)
    )


def _close_all(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def map_arenas(arenas: dict[int, int]) -> dict[int, Window]:
    """Map the ranks' arenas, except those that cannot be mapped, and close the descriptors."""
    windows = {}
    for owner, descriptor in arenas.items():
        with suppress(OSError):
            window = Window(descriptor, 0, os.fstat(descriptor).st_size)
            window.keep_from_forks()  # a forked child is no rank of the job
            windows[owner] = window
    _close_all(arenas.values())
    return windows


def _same_user(connection: socket.socket) -> bool:
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return bool(user == os.geteuid())
