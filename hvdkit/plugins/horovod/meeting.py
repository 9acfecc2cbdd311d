"""Where the ranks of Horovod's engine meet, if Gloo connects them: keys and values over HTTP, as Horovod's client asks.

Horovod's launcher has such a server, with the places of all ranks fixed in advance; other launchers have none. Rank 0
serves this one while the engine starts.
"""

from __future__ import annotations

import logging
import socket
import sys
import threading
from collections.abc import Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from hvdkit.environments.base import World
from hvdkit.transports.security.listening import addresses_for

logger = logging.getLogger("hvdkit")

LARGEST_VALUE = 1 << 20  # bytes
# Gloo's addresses take 136 bytes for each of two ranks, in two groups. Besides, one value of any kind has room.
BYTES_OF_A_PAIR = 512
KEYS_OF_A_RANK = 16  # Gloo has one for each of its three groups
POLL_SECONDS = 0.02  # between two looks at whether to end
SILENCE_SECONDS = 10.0  # of a client
MOST_LOGGED = 5  # addresses of whoever was refused


class _Handler(BaseHTTPRequestHandler):
    server: Meeting
    timeout = SILENCE_SECONDS

    def do_GET(self) -> None:
        if not self._is_let_in():
            return
        value = self.server.values.get(self.path)
        self._answer(404 if value is None else 200, value or b"")

    def do_PUT(self) -> None:
        if not self._is_let_in():
            return
        length = self.headers.get("Content-Length", "")
        if not length.isdigit() or int(length) > LARGEST_VALUE:
            self._answer(400, b"")
            return
        value = self.rfile.read(int(length))
        if len(value) < int(length):  # cut off in the middle, and the client will try again
            self._answer(400, b"")
            return
        self._answer(200 if self.server.keep(self.path, value) else 409, b"")

    def do_DELETE(self) -> None:
        """A client has got all it needs. Others may not have: values stay as long as the server."""
        self._answer(200, b"")

    def _is_let_in(self) -> bool:
        if self.server.lets_in(str(self.client_address[0]).partition("%")[0]):
            return True
        self._answer(403, b"")
        return False

    def _answer(self, status: int, value: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(value)))
        self.end_headers()
        self.wfile.write(value)

    def log_message(self, format: str, *args: object) -> None:  # the name is the base class's
        """Nothing: standard error is the script's."""


class Meeting(ThreadingHTTPServer):
    """The server, from now until ``close``; ``address`` is its host and port as the other ranks see them."""

    daemon_threads = True
    request_queue_size = 1024  # all ranks come at once

    def __init__(self, world: World) -> None:
        address, ranks = addresses_for(world)[0], world.size
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        super().__init__((address, 0), _Handler)
        self.address = address, int(self.server_address[1])
        self.values: dict[str, bytes] = {}
        self._refused: set[str] = set()
        self._members: frozenset[str] = frozenset()
        self._admits = threading.Event()
        self._most_keys = KEYS_OF_A_RANK * ranks
        self._most_bytes = LARGEST_VALUE + BYTES_OF_A_PAIR * ranks * ranks
        self._kept = 0  # bytes
        self._lock = threading.Lock()
        self._thread = threading.Thread(
            target=self.serve_forever, args=(POLL_SECONDS,), name="hvdkit-meeting", daemon=True
        )
        self._thread.start()

    def admit(self, addresses: Iterable[str]) -> None:
        """Let clients at these addresses in. Until it is known who takes part, they wait."""
        self._members = frozenset(addresses)
        self._admits.set()

    def lets_in(self, address: str) -> bool:
        """Whether a client is on a host of the job: Horovod's ranks have no other proof."""
        # Another rank may have heard a moment before this one who takes part.
        if self._admits.wait(SILENCE_SECONDS) and address in self._members:
            return True
        with self._lock:
            new = address not in self._refused and len(self._refused) < MOST_LOGGED
            if new:
                self._refused.add(address)
        if new:  # at once: Horovod ends a rank that is refused, and this job with it
            logger.warning(
                "rank 0 refused a client at %s, which is no address of the job's hosts, where the ranks of Horovod's "
                "engine meet. If it is a rank behind a translation of addresses, set HVDKIT_TRANSPORT=torch or mpi.",
                address,
            )
        return False

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that goes away in the middle is no error of the script, on whose standard error it would be told."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]

    def keep(self, key: str, value: bytes) -> bool:
        """Whether the value is at the key from now on: the first one that came stays."""
        with self._lock:
            if key in self.values:
                return self.values[key] == value
            if len(self.values) >= self._most_keys or self._kept + len(value) > self._most_bytes:
                return False
            self.values[key] = value
            self._kept += len(value)
            return True

    def close(self) -> None:
        """Serve no longer."""
        self.shutdown()
        self.server_close()
        self._thread.join()
