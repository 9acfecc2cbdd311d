"""Control messages over sockets: a connection to a rank is made when the first word is for it, one thread serves all.

Who connects and who is connected to prove to each other that they belong to the session (``security/credentials``)
before anything else that they say is looked at. A connection that ends tells at once that its rank is lost.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import selectors
import socket
import struct
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Sequence
from time import monotonic, sleep

from hvdkit.transports.link import AT_ONCE, Link
from hvdkit.transports.security.credentials import (
    ANSWER_BYTES,
    HELLO_BYTES,
    PROOF_BYTES,
    Credentials,
    Initiator,
    NotAuthenticError,
    Responder,
)

logger = logging.getLogger("hvdkit")

Place = tuple[str, int]  # an address, and a port

LONGEST_MESSAGE = 1 << 28  # a plan has some hundred bytes for each parameter
GREETING_SECONDS = 10.0  # for who has connected to show that he is a rank
# Connections on which nobody has shown who he is, or two for each rank; then the oldest one goes. A rank comes again.
MOST_STRANGERS = 256
AGAIN_SECONDS, ACCEPTING_PAUSE = 0.1, 0.01
# What this process has too many of, or the system too little.
OUR_LIMITS = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL}
LOOK_SECONDS, CLOSING_SECONDS = 1.0, 1.0
_FRAME = struct.Struct("<IB")  # the bytes that follow, and what they are
# What a frame is: a message, or that its sender wants to exchange buffers with who gets it.
MESSAGE, PAIR = 0, 1
_ADMITTED = _FRAME.pack(0, MESSAGE)


class ControlConnections:
    """This rank's connections to others, each of which listens at its one of ``places``, this one at ``listener``.

    ``heard(peer, kind, payload)`` and ``lost(peer, how)`` are called on a thread of its own, in the order of what came.
    """

    def __init__(
        self,
        rank: int,
        listener: socket.socket,
        places: Sequence[Place],
        session: Credentials,
        heard: Callable[[int, int, bytes], None],
        lost: Callable[[int, str], None],
    ) -> None:
        self._rank, self._places, self._session = rank, places, session
        self._heard, self._lost = heard, lost
        self._links: dict[int, Link] = {}  # over which this rank sends
        self._open: set[Link] = set()
        self._again: list[Link] = []  # those to connect once more
        self._todo: deque[Callable[[], None]] = deque()
        self._closing = False
        self._selector = selectors.DefaultSelector()
        self._listener = listener
        self._rings, self._rung = socket.socketpair()
        for one in (listener, self._rings, self._rung):
            one.setblocking(False)
        for one in (listener, self._rung):
            self._selector.register(one, selectors.EVENT_READ)
        _SERVED.add(self)
        self._thread = threading.Thread(target=self._serve, name="hvdkit-control", daemon=True)
        self._thread.start()

    # -- for any thread -----------------------------------------------------------------------------------------------

    def send(self, peer: int, kind: int, payload: bytes) -> None:
        """Send in the order of the calls; never waits. What is for a rank that is lost goes nowhere."""
        link = self._links.get(peer)
        if link is None or (link.ended and link.is_needless):
            if link is not None:
                self._links.pop(peer, None)
            made = Link(peer)
            link = self._links.setdefault(peer, made)  # the peer may have connected just now
            if link is made:
                self._have_done(lambda: self._connect(made))
        with link.lock:
            if link.ended:
                return
            is_first = not link.unsent
            link.unsent += _FRAME.pack(len(payload), kind) + payload
            if not is_first or not link.greeted:
                return  # whoever sends what is before it sends this too
            link.send_some()
            if not link.unsent:
                return
        self._have_done(lambda: self._watch(link))

    def let_go(self, peers: Collection[int]) -> None:
        """That these end the connections that there are is no loss; what is said to them later needs new ones."""
        for link in list(self._open):
            link.is_needless |= link.peer in peers

    def drop(self) -> None:
        """End the connections to those that were let go."""
        needless = [link for link in list(self._open) if link.is_needless]
        for link in needless:
            if self._links.get(link.peer) is link:
                del self._links[link.peer]

        def end() -> None:
            for link in needless:
                self._end(link)

        self._have_done(end)

    def connected(self) -> list[int]:
        """The ranks to which there are connections."""
        return sorted({link.peer for link in list(self._open) if link.greeted})

    def close(self) -> None:
        """Say what is still to be said, for a moment, and end all connections and the thread."""
        self._closing = True
        self._ring()
        if self._thread is not threading.current_thread():
            self._thread.join(2 * (CLOSING_SECONDS + LOOK_SECONDS))

    def leave_to_parent(self) -> None:
        """In a forked child: a connection of which it had a copy would not end with its parent."""
        for one in [self._listener, self._rings, self._rung, *(link.socket for link in self._open)]:
            if one is not None:
                one.close()
        self._selector.close()

    def _have_done(self, action: Callable[[], None]) -> None:
        self._todo.append(action)
        self._ring()

    def _ring(self) -> None:
        with contextlib.suppress(OSError):  # it is full, so it rings; or the thread has ended
            self._rings.send(b"!")

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            self._serve_until_closed()
        except Exception as error:  # a defect, or a limit of this process: who waits for words must learn of it
            logger.exception("connections for control messages failed")
            for peer in list(self._links):
                if not self._closing:
                    self._lost(peer, f"the thread of this rank that serves connections failed: {error!r}")
        finally:
            _SERVED.discard(self)
            for link in list(self._open):
                self._end(link)
            for one in (self._listener, self._rings, self._rung):
                one.close()
            self._selector.close()

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
            for link in [one for one in self._again if now > one.since + AGAIN_SECONDS]:
                self._again.remove(link)
                self._connect(link)
            for link in [one for one in self._open if one.peer < 0 and now > one.since + GREETING_SECONDS]:
                self._end(link)
            if self._closing:
                closing_at = min(closing_at, now + CLOSING_SECONDS)
                if self._has_closed() or now >= closing_at:
                    return

    def _has_closed(self) -> bool:
        """Whether all has been said, and the others have seen the end of it. To close before would lose the rest."""
        if any(link.unsent for link in self._links.values()):
            return False
        for link in list(self._open):
            if not link.greeted:
                self._end(link)
            elif link.socket is not None:
                with contextlib.suppress(OSError):  # it has ended there
                    link.socket.shutdown(socket.SHUT_WR)
        return not self._open

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:  # it went away, or there are too many files
            logger.debug("a connection was not accepted: %s", error)
            sleep(ACCEPTING_PAUSE)
            return
        strangers = [link for link in self._open if link.peer < 0]
        if len(strangers) >= max(MOST_STRANGERS, 2 * len(self._places)):
            self._end(min(strangers, key=lambda link: link.since))
        link = Link()
        link.wants, link.then = HELLO_BYTES, self._answer
        self._begin(link, connection)

    def _connect(self, link: Link) -> None:
        host, port = self._places[link.peer]
        side = Initiator(self._session, self._rank, link.peer)
        link.since = monotonic()
        link.greeting[:] = side.hello
        link.came.clear()
        link.wants, link.then = ANSWER_BYTES, lambda link, part: self._prove(link, side, part)
        try:
            connection = _dialled(host, port)
        except OSError as error:
            ours = error.errno in OUR_LIMITS
            what = f"rank {self._rank} cannot connect to it" if ours else "it cannot be reached"
            self._end(link, f"{what} at {host} port {port}: {error.strerror}")
            return
        self._begin(link, connection)

    def _begin(self, link: Link, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.socket = connection
        self._open.add(link)
        self._selector.register(connection, selectors.EVENT_READ, link)
        self._watch(link)

    def _watch(self, link: Link) -> None:
        """Be told when the socket takes what it did not take, if there is something."""
        if link in self._open and link.socket is not None:
            with link.lock:
                more = selectors.EVENT_WRITE if link.has_more() else 0
            self._selector.modify(link.socket, selectors.EVENT_READ | more, link)

    def _move(self, link: Link, events: int) -> None:
        assert link.socket is not None
        if events & selectors.EVENT_WRITE:
            with link.lock:
                link.send_some()
            self._watch(link)
        if not events & selectors.EVENT_READ:
            return
        try:
            part = link.socket.recv(AT_ONCE)
        except BlockingIOError:
            return
        except OSError as error:
            part, link.broke = b"", link.broke or error
        if not part:
            # Broken is what the sender saw, where both did: the system tells it once.
            turned_away = link.broke is None or isinstance(link.broke, (ConnectionResetError, BrokenPipeError))
            if turned_away and link.peer >= 0 and not link.greeted:
                self._come_again(link)
            else:
                self._end(link, f"Connection closed by peer{'' if link.broke is None else f': {link.broke.strerror}'}")
            return
        link.came += part
        while link in self._open and len(link.came) >= link.wants:
            part = bytes(link.came[: link.wants])
            del link.came[: link.wants]
            link.then(link, part)

    def _come_again(self, link: Link) -> None:
        """It was ended before it had begun, as where too many came at once. What is to be said over it waits."""
        with link.lock:
            self._close_socket(link)
            link.broke = None
        self._open.discard(link)
        link.since = monotonic()
        self._again.append(link)

    def _close_socket(self, link: Link) -> None:
        if link.socket is not None:
            self._selector.unregister(link.socket)
            link.socket.close()
            link.socket = None

    def _end(self, link: Link, how: str = "") -> None:
        """``how``: why its rank is lost, if it is."""
        self._open.discard(link)
        with link.lock:
            link.ended = True
            link.unsent.clear()
            self._close_socket(link)
        if how and link.peer >= 0 and not link.is_needless and not self._closing:
            self._lost(link.peer, how)

    # -- greetings ----------------------------------------------------------------------------------------------------

    def _answer(self, link: Link, part: bytes) -> None:
        """To who has connected: who is here."""
        side = Responder(self._session, self._rank, len(self._places), part)
        with link.lock:
            link.greeting += side.answer
        link.wants, link.then = PROOF_BYTES, lambda link, part: self._admit(link, side, part)
        self._watch(link)

    def _admit(self, link: Link, side: Responder, part: bytes) -> None:
        try:
            rank = side.admitted(part)
        except NotAuthenticError as error:
            logger.debug("%s", error)
            self._end(link)
            return
        link.peer = rank
        self._links.setdefault(rank, link)
        with link.lock:
            link.greeting += _ADMITTED
        self._greet(link)

    def _prove(self, link: Link, side: Initiator, part: bytes) -> None:
        """To who was connected to: that this is the rank that it said."""
        try:
            proof = side.proof(part)
        except NotAuthenticError as error:
            self._end(link, str(error))
            return
        with link.lock:
            link.greeting += proof
        # Only then is it heard there: till then it may be turned away, and comes again.
        link.wants, link.then = _FRAME.size, self._admitted
        self._watch(link)

    def _admitted(self, link: Link, part: bytes) -> None:
        if part != _ADMITTED:
            self._end(link, "it began with what no rank says")
            return
        self._greet(link)

    def _greet(self, link: Link) -> None:
        link.wants, link.then = _FRAME.size, self._head
        with link.lock:
            link.greeted = True
            link.send_some()
        self._watch(link)

    # -- frames -------------------------------------------------------------------------------------------------------

    def _head(self, link: Link, part: bytes) -> None:
        length, kind = _FRAME.unpack(part)
        if length > LONGEST_MESSAGE or kind not in (MESSAGE, PAIR):
            self._end(link, f"it sent a control message of kind {kind} and {length} bytes")
            return

        def take(link: Link, payload: bytes) -> None:
            link.wants, link.then = _FRAME.size, self._head
            self._heard(link.peer, kind, payload)

        link.wants, link.then = length, take


def _dialled(host: str, port: int) -> socket.socket:
    """A connection that is being made. Raises OSError, also where this process has too many files."""
    connection = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            connection.connect((host, port))
    except OSError:
        connection.close()
        raise
    return connection


_SERVED: weakref.WeakSet[ControlConnections] = weakref.WeakSet()


def _begin_child() -> None:
    for one in list(_SERVED):
        one.leave_to_parent()


os.register_at_fork(after_in_child=_begin_child)
