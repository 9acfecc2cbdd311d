"""Control messages over sockets: two ranks connect when one of them has a message, and one thread serves all.

Both ends prove that they belong to the session (``security/credentials``) before anything else that comes is read. The
end of a connection tells at once that its rank is lost.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import selectors
import socket
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from time import monotonic, sleep

from hvdkit.transports.link import ADMITTED, AT_ONCE, FRAME, LONGEST_MESSAGE, MESSAGE, PAIR, Link, Reader, dialled
from hvdkit.transports.security.credentials import HELLO_BYTES, Credentials, NotAuthenticError, initiate, respond

logger = logging.getLogger("hvdkit")

GREETING_SECONDS = 10.0  # a process that has connected must prove within this time that it is a rank
# The most connections without a proof, if that is more than two a rank; the oldest is ended. A rank connects again.
MOST_STRANGERS = 256
AGAIN_SECONDS = 0.1  # before a connection is tried once more
ACCEPTING_PAUSE = 0.01  # seconds, after accept() failed
# Errors of this process or its host, not of the peer.
OUR_LIMITS = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL}
LOOK_SECONDS = 1.0  # between two looks at deadlines
CLOSING_SECONDS = 1.0  # for messages that are left when connections close


class ControlConnections:
    """The connections of ``rank``, which listens at ``listener``, to ranks that listen at ``places`` (host and port).

    ``receive(peer, kind, payload)`` and ``lose(peer, reason)`` are called on a thread of its own, in the order in which
    frames arrive. Public methods are for any thread, all others for that thread.
    """

    def __init__(
        self,
        rank: int,
        listener: socket.socket,
        places: Sequence[tuple[str, int]],
        session: Credentials,
        receive: Callable[[int, int, bytes], None],
        lose: Callable[[int, str], None],
    ) -> None:
        self._rank, self._places, self._session = rank, places, session
        self._receive, self._lose = receive, lose
        self._links: dict[int, Link] = {}  # over which this rank sends
        self._open: set[Link] = set()
        self._again: list[Link] = []  # links to connect once more, after AGAIN_SECONDS
        self._todo: deque[Callable[[], None]] = deque()
        self._closing = False
        self._selector = selectors.DefaultSelector()
        self._listener = listener
        self._rings, self._rung = socket.socketpair()
        self._rings.setblocking(False)
        for end in (listener, self._rung):
            end.setblocking(False)
            self._selector.register(end, selectors.EVENT_READ)
        _SERVED.add(self)
        self._thread = threading.Thread(target=self._serve, name="hvdkit-control", daemon=True)
        self._thread.start()

    def send(self, peer: int, kind: int, payload: bytes) -> None:
        """Send in the order of the calls; never waits. A message to a lost rank is dropped."""
        link = self._links.get(peer)
        if link is None or (link.ended and link.is_needless):
            if link is not None:
                self._links.pop(peer, None)
            made = Link(peer)
            link = self._links.setdefault(peer, made)  # the peer may have connected just now
            if link is made:
                self._do_later(partial(self._connect, made))
        with link.lock:
            if link.ended:
                return
            is_first = not link.unsent
            link.unsent += FRAME.pack(len(payload), kind) + payload
            if not is_first or not link.greeted:
                return  # the sender of the bytes before these sends these too
            link.send_some()
            if not link.unsent:
                return
        self._do_later(partial(self._watch, link))

    def let_go(self, peers: Collection[int]) -> None:
        """Treat the end of the present connections to ``peers`` as no loss; later messages open new connections."""
        for link in list(self._open):
            link.is_needless |= link.peer in peers

    def drop(self) -> None:
        """End the connections that were let go."""
        for link in [link for link in list(self._open) if link.is_needless]:
            if self._links.get(link.peer) is link:
                del self._links[link.peer]
            self._do_later(partial(self._end, link))

    def close(self) -> None:
        """Send what is left, for a moment, and end all connections and the thread."""
        self._closing = True
        self._do_later(lambda: None)
        self._thread.join(2 * (CLOSING_SECONDS + LOOK_SECONDS))

    def close_copies(self) -> None:
        """Close a forked child's copies of the connections, and leave the connections to the parent."""
        for end in (self._selector, self._listener, self._rings, self._rung, *(link.socket for link in self._open)):
            if end is not None:
                end.close()

    def _do_later(self, action: Callable[[], None]) -> None:
        """Have the thread of the connections do something."""
        self._todo.append(action)
        with contextlib.suppress(OSError):  # the pipe is full, so the thread wakes; or the thread has ended
            self._rings.send(b"!")

    def _serve(self) -> None:
        try:
            self._serve_until_closed()
        except Exception as error:  # a defect, or a limit of this process: threads that wait for messages must learn it
            logger.exception("connections for control messages failed")
            for peer in list(self._links) if not self._closing else ():
                self._lose(peer, f"the thread of this rank that serves connections failed: {error!r}")
        finally:
            _SERVED.discard(self)
            for link in list(self._open):
                self._end(link)
            self.close_copies()

    def _serve_until_closed(self) -> None:
        closing_at = float("inf")
        while True:
            for key, events in self._selector.select(AGAIN_SECONDS if self._again else LOOK_SECONDS):
                if key.fileobj is self._rung:
                    self._rung.recv(AT_ONCE)
                elif key.fileobj is self._listener:
                    self._accept()
                elif key.data in self._open:
                    self._move(key.data, events)
            while self._todo:
                self._todo.popleft()()
            now = monotonic()
            for link in [link for link in self._again if now > link.since + AGAIN_SECONDS]:
                self._again.remove(link)
                self._connect(link)
            for link in [link for link in self._open if link.peer < 0 and now > link.since + GREETING_SECONDS]:
                self._end(link)
            if self._closing:
                closing_at = min(closing_at, now + CLOSING_SECONDS)
                if self._has_closed() or now >= closing_at:
                    return

    def _has_closed(self) -> bool:
        """True if all is sent and the peers have closed their ends, before which closing would lose the rest."""
        if any(link.unsent for link in self._links.values()):
            return False
        for link in list(self._open):
            if not link.greeted:
                self._end(link)
            elif link.socket is not None:
                with contextlib.suppress(OSError):  # the peer has closed it already
                    link.socket.shutdown(socket.SHUT_WR)
        return not self._open

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:  # the peer has gone away, or there are too many files
            logger.debug("a connection was not accepted: %s", error)
            sleep(ACCEPTING_PAUSE)
            return
        strangers = [link for link in self._open if link.peer < 0]
        if len(strangers) >= max(MOST_STRANGERS, 2 * len(self._places)):
            self._end(min(strangers, key=lambda link: link.since))
        link = Link()
        link.read_with(self._read_accepted(link))
        self._begin(link, connection)

    def _connect(self, link: Link) -> None:
        host, port = self._places[link.peer]
        link.since = monotonic()
        link.greeting.clear()
        link.read_with(self._read_connected(link))
        try:
            self._begin(link, dialled(host, port))
        except OSError as error:
            is_ours = error.errno in OUR_LIMITS
            problem = f"rank {self._rank} cannot connect to it" if is_ours else "it cannot be reached"
            self._end(link, f"{problem} at {host} port {port}: {error.strerror}")

    def _begin(self, link: Link, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.socket = connection
        self._open.add(link)
        self._selector.register(connection, selectors.EVENT_READ, link)
        self._watch(link)

    def _watch(self, link: Link) -> None:
        """Wait for input, and for room in the socket if something is left to send."""
        if link in self._open and link.socket is not None:
            with link.lock:
                has_more = link.greeting or (link.greeted and link.unsent)
            events = selectors.EVENT_READ | selectors.EVENT_WRITE if has_more else selectors.EVENT_READ
            self._selector.modify(link.socket, events, link)

    def _move(self, link: Link, events: int) -> None:
        assert link.socket is not None
        if events & selectors.EVENT_WRITE:
            with link.lock:
                link.send_some()
            self._watch(link)
        data = link.receive_some() if events & selectors.EVENT_READ else None
        if data:
            try:
                link.feed(data)
            except NotAuthenticError as error:
                logger.debug("%s", error)
                self._end(link, str(error))
        elif data is not None:
            turned_away = link.broke is None or isinstance(link.broke, (ConnectionResetError, BrokenPipeError))
            if turned_away and link.peer >= 0 and not link.greeted:
                self._connect_again_later(link)
            else:
                self._end(link, f"Connection closed by peer{'' if link.broke is None else f': {link.broke.strerror}'}")

    def _connect_again_later(self, link: Link) -> None:
        """Retry a connection that the peer ended before the greeting, as when too many came at once."""
        self._open.discard(link)
        with link.lock:
            link.close(self._selector)
            link.broke = None
        link.since = monotonic()
        self._again.append(link)

    def _end(self, link: Link, reason: str = "") -> None:
        """End a connection. ``reason``: why its rank is lost, if it is."""
        self._open.discard(link)
        with link.lock:
            link.ended = True
            link.unsent.clear()
            link.close(self._selector)
        if reason and link.peer >= 0 and not link.is_needless and not self._closing:
            self._lose(link.peer, reason)

    def _read_accepted(self, link: Link) -> Reader:
        """Answer a process that has connected, and admit it if it proves to be a rank."""
        hello = yield HELLO_BYTES
        link.peer = yield from respond(self._session, self._rank, len(self._places), hello, partial(self._greet, link))
        self._links.setdefault(link.peer, link)
        with link.lock:
            link.greeting += ADMITTED
        yield from self._read_frames(link)

    def _read_connected(self, link: Link) -> Reader:
        """Prove to the peer that this is the rank that it says."""
        yield from initiate(self._session, self._rank, link.peer, partial(self._greet, link))
        # Frames follow only when the peer has admitted this rank; until then it may close, and this rank comes again.
        if (yield FRAME.size) != ADMITTED:
            raise NotAuthenticError("its first bytes are not those of a rank")
        yield from self._read_frames(link)

    def _greet(self, link: Link, greeting: bytes) -> None:
        with link.lock:
            link.greeting += greeting
        self._watch(link)

    def _read_frames(self, link: Link) -> Reader:
        with link.lock:
            link.greeted = True
            link.send_some()
        self._watch(link)
        while True:
            length, kind = FRAME.unpack((yield FRAME.size))
            if length > LONGEST_MESSAGE or kind not in (MESSAGE, PAIR):
                raise NotAuthenticError(f"it sent a control message of kind {kind} and {length} bytes")
            self._receive(link.peer, kind, (yield length))


_SERVED: weakref.WeakSet[ControlConnections] = weakref.WeakSet()


def _close_copies() -> None:
    for connections in list(_SERVED):
        connections.close_copies()


os.register_at_fork(after_in_child=_close_copies)  # else a connection of a parent would outlive it in the child
