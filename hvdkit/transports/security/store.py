"""The store where the ranks of a job meet. Rank 0 serves it to processes that prove the job's secret, to no others.

PyTorch's TCPStore keeps what anybody sends. Here a connection begins with the handshake of ``credentials``, within a
few seconds; nothing is kept of it before. When all ranks have connected, the port is closed: later requests go over
these connections.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import threading
from collections.abc import Collection, Sequence
from datetime import timedelta
from time import monotonic, sleep

from torch._C._distributed_c10d import Store

from hvdkit.errors import AuthenticationError, PeerLostError
from hvdkit.transports.link import AT_ONCE, Incoming, Reader, receive
from hvdkit.transports.security.credentials import HELLO_BYTES, Credentials, NotAuthenticError, initiate, respond

STORE = (1 << 32) - 1  # the server's number in proofs, which no rank has
SET, GET, CHECK = range(3)
_REQUEST = struct.Struct("<BII")  # SET, GET or CHECK, bytes of the keys, bytes of the value
_ANSWER = struct.Struct("<BI")  # whether all keys are there, bytes of their values
_LENGTH = struct.Struct("<I")
LONGEST = 1 << 24  # of a request: the keys of some ten thousand ranks
HANDSHAKE_SECONDS, RETRY_SECONDS = 10.0, 0.05
MOST_UNPROVED = 64  # connections that have proved nothing, beside those of the ranks that are expected


def pause(waited_seconds: float) -> None:
    """Sleep between two looks at a store for an eighth of the wait, so that looking adds no more than that."""
    sleep(min(max(waited_seconds / 8, 0.002), 0.25))


def _joined(parts: Sequence[bytes]) -> bytes:
    return b"".join(_LENGTH.pack(len(part)) + part for part in parts)


def _split(joined: bytes) -> list[bytes]:
    parts, begin = [], 0
    while begin < len(joined):
        end = begin + _LENGTH.size + _LENGTH.unpack_from(joined, begin)[0]
        parts.append(joined[begin + _LENGTH.size : end])
        begin = end
    return parts


class _Client(Incoming):
    """A connection to the server, which must have proved to be a rank until ``deadline``."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__()
        self.connection = connection
        self.deadline = monotonic() + HANDSHAKE_SECONDS
        self.claimed = -1  # the rank that the client says to be
        self.is_admitted = False


class StoreServer:
    """The thread of rank 0 that answers ranks, as long as the process lives: jobs of other ranks may meet there."""

    def __init__(self, session: Credentials, address: tuple[str, int]) -> None:
        self._values: dict[bytes, bytes] = {}
        self._values_lock = threading.Lock()
        self.address = address  # of the listener, which is open as long as ranks are expected
        self.refused: set[int] = set()  # ranks that a client without the secret said to be
        self._session = session
        self._selector = selectors.DefaultSelector()
        self._listener: socket.socket | None = None
        self._clients: dict[socket.socket, _Client] = {}
        self._expected: set[int] = set()
        self._wakes, self._woken = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._lock = threading.Lock()  # of the expected ranks, and so of the listener
        threading.Thread(target=self._serve, name="store of hvdkit", daemon=True).start()

    def expect(self, ranks: Collection[int], listener: socket.socket | None) -> None:
        """Admit these ranks, by ``listener``, which is closed when all have come."""
        with self._lock:
            self._expected |= set(ranks)
            if listener is not None:
                self._listener = listener
                self._selector.register(listener, selectors.EVENT_READ)
            self._close_if_complete()
        self._wakes.send(b"\0")

    def answer(self, request: int, keys: bytes, value: bytes) -> tuple[bool, bytes]:
        """Return True if all keys are there, and for GET their values."""
        names = _split(keys)
        with self._values_lock:
            if request == SET:
                self._values[names[0]] = value
                return True, b""
            is_there = all(name in self._values for name in names)
            return is_there, _joined([self._values[name] for name in names]) if is_there and request == GET else b""

    def lacks(self, ranks: Collection[int]) -> bool:
        """True if some of these ranks are not connected, as a rank that has died and is started anew."""
        connected = {client.claimed for client in list(self._clients.values()) if client.is_admitted}
        return not connected.issuperset(ranks)

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select(1.0):
                if key.fileobj is self._woken:
                    self._woken.recv(1)
                elif key.fileobj is self._listener:
                    self._accept()
                elif (client := self._clients.get(key.fileobj)) and not self._receive(client):  # type: ignore[call-overload]
                    self._drop(client)
            for client in self._unproved():
                if monotonic() > client.deadline:
                    self._drop(client)

    def _unproved(self) -> list[_Client]:
        return [client for client in self._clients.values() if not client.is_admitted]

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            connection, _ = self._listener.accept()
        except OSError:  # the client has gone, or this process has no descriptor left
            sleep(RETRY_SECONDS)
            return
        if len(unproved := self._unproved()) >= MOST_UNPROVED + len(self._expected):
            self._drop(unproved[0])
        connection.settimeout(HANDSHAKE_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._clients[connection] = client = _Client(connection)
        client.read_with(self._read(client))
        self._selector.register(connection, selectors.EVENT_READ)

    def _drop(self, client: _Client) -> None:
        if client.claimed >= 0 and not client.is_admitted:
            self.refused.add(client.claimed)
        self._selector.unregister(client.connection)
        del self._clients[client.connection]
        client.connection.close()

    def _receive(self, client: _Client) -> bool:
        """Receive from a connection. Returns True if it may stay."""
        try:
            data = client.connection.recv(AT_ONCE if client.is_admitted else HELLO_BYTES)
            client.feed(data)
            return bool(data)
        except (OSError, NotAuthenticError):
            return False

    def _read(self, client: _Client) -> Reader:
        """Shake hands with a client, then answer its requests."""
        send = client.connection.sendall
        hello = yield HELLO_BYTES
        client.claimed = int.from_bytes(hello[:4], "little")
        yield from respond(self._session, STORE, max(self._expected) + 1, hello, send)
        client.is_admitted = True
        with self._lock:
            self._close_if_complete()
        while True:
            request, keys, value = _REQUEST.unpack((yield _REQUEST.size))
            if keys + value > LONGEST:
                raise NotAuthenticError("the request is too long")
            is_there, values = self.answer(request, (yield keys), (yield value))
            send(_ANSWER.pack(is_there, len(values)) + values)

    def _close_if_complete(self) -> None:
        if self._listener is not None and not self.lacks(self._expected):
            self._selector.unregister(self._listener)
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # for processes that have inherited it, too
            self._listener.close()
            self._listener = None


class RendezvousStore(Store):
    """The store as a rank uses it: the server's memory on rank 0, else a connection to it.

    Raises PeerLostError where the server is gone, RuntimeError where keys are not there in time.
    """

    def __init__(self, server: StoreServer | socket.socket, timeout_seconds: float) -> None:
        super().__init__()
        self._server, self._timeout_seconds = server, timeout_seconds
        self.is_broken = False
        self._lock = threading.Lock()

    def set(self, key: str, value: str | bytes) -> None:
        self._request(SET, [key], value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.wait(keys)
        return _split(self._request(GET, keys)[1])

    def has_extended_api(self) -> bool:
        return True

    def check(self, keys: list[str]) -> bool:
        return self._request(CHECK, keys)[0]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        seconds = self._timeout_seconds if timeout is None else timeout.total_seconds()
        began = monotonic()
        # A request that waits would keep the store from the other threads of this process.
        while not self.check(keys):
            waited = monotonic() - began
            if waited > seconds:
                raise RuntimeError(f"the store did not have {keys[:8]} within {seconds:g} s")
            pause(waited)

    def _request(self, request: int, keys: Sequence[str], value: bytes = b"") -> tuple[bool, bytes]:
        joined = _joined([key.encode() for key in keys])
        if isinstance(self._server, StoreServer):
            return self._server.answer(request, joined, value)
        with self._lock:
            try:
                # Until the answer is there: a late answer does not belong to the next request.
                self.is_broken = True
                self._server.sendall(_REQUEST.pack(request, len(joined), len(value)) + joined + value)
                is_there, length = _ANSWER.unpack(receive(self._server, _ANSWER.size))
                values = receive(self._server, length)
                self.is_broken = False
                return bool(is_there), values
            except OSError as error:
                self._server.close()
                raise PeerLostError(f"rank 0, which serves the store, does not answer: {error}", rank=0) from error


def connect(session: Credentials, me: int, address: tuple[str, int], timeout_seconds: float) -> RendezvousStore:
    """Connect to the store of rank 0, which may start later.

    Raises AuthenticationError if the listener does not know the secret, OSError if it does not admit this rank in time.
    """
    deadline = monotonic() + timeout_seconds
    while True:
        with contextlib.ExitStack() as unless_connected:
            try:
                seconds = max(deadline - monotonic(), RETRY_SECONDS)
                connection = unless_connected.enter_context(socket.create_connection(address, timeout=seconds))
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                handshake = initiate(session, me, STORE, connection.sendall)
                with contextlib.suppress(StopIteration):
                    handshake.send(receive(connection, next(handshake)))
                connection.settimeout(timeout_seconds)
                unless_connected.pop_all()
                return RendezvousStore(connection, timeout_seconds)
            except NotAuthenticError:
                raise AuthenticationError("a peer claiming to be rank 0 does not know the job's secret.") from None
            except OSError:
                if monotonic() > deadline:
                    raise
        sleep(RETRY_SECONDS)
