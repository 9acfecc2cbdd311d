"""One connection for control messages: what came over it and is not whole yet, and what it did not take yet."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from time import monotonic

AT_ONCE = 1 << 16


class Link:
    """One connection. The next ``wants`` bytes that come are for ``then``."""

    def __init__(self, peer: int = -1) -> None:
        self.peer = peer  # -1: nobody has shown who he is
        self.since = monotonic()
        self.is_needless = False  # that it ends is no loss
        self.broke: OSError | None = None
        self.greeted = False
        self.ended = False
        self.socket: socket.socket | None = None
        self.lock = threading.Lock()  # of what is sent, by the engine and by the thread that serves
        self.greeting, self.unsent = bytearray(), bytearray()
        self.came = bytearray()
        self.wants = 0
        self.then: Callable[[Link, bytes], None] = lambda link, part: None

    def send_some(self) -> None:
        """Under the lock: as much as the socket takes. How it broke is told by who receives."""
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
            if self.greeted:  # else it may come again
                self.unsent.clear()

    def has_more(self) -> bool:
        """Whether something could be sent if the socket took it."""
        return bool(self.greeting or (self.greeted and self.unsent))
