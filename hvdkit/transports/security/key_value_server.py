"""A key-value server on rank 0, where Gloo's ranks of Horovod's engine meet; only Horovod's launcher has its own."""

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
BYTES_OF_A_PAIR = 512  # of ranks: Gloo's addresses take 136 bytes, in two groups
KEYS_OF_A_RANK = 16  # Gloo has one for each of its three groups
MOST_LOGGED = 5  # addresses of refused clients
POLL_SECONDS = 0.02  # between two looks at whether to end


class _Handler(BaseHTTPRequestHandler):
    server: KeyValueServer
    timeout = 10.0  # seconds of a client's silence

    def parse_request(self) -> bool:
        if not super().parse_request():
            return False
        if self.server.admits(str(self.client_address[0]).partition("%")[0]):
            return True
        self._answer(403)
        return False

    def do_GET(self) -> None:
        value = self.server.values.get(self.path)
        self._answer(404 if value is None else 200, value or b"")

    def do_PUT(self) -> None:
        length = self.headers.get("Content-Length", "")
        nbytes = int(length) if length.isdigit() else LARGEST_VALUE + 1
        value = self.rfile.read(nbytes) if nbytes <= LARGEST_VALUE else b""
        if len(value) < nbytes:  # too long, or cut off in the middle: the client will try again
            self._answer(400)
        else:
            self._answer(200 if self.server.keep(self.path, value) else 409)

    def do_DELETE(self) -> None:
        """Keep the value: this client has all it needs, others may not."""
        self._answer(200)

    def _answer(self, status: int, value: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(value)))
        self.end_headers()
        self.wfile.write(value)

    def log_message(self, format: str, *args: object) -> None:  # the name is the base class's
        """Write nothing."""


class KeyValueServer(ThreadingHTTPServer):
    """Serves from a thread of its own, from ``admit`` until it is closed. ``address`` has its host and port."""

    daemon_threads = True
    request_queue_size = 1024  # all ranks come at once

    def __init__(self, world: World) -> None:
        address = addresses_for(world)[0]
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        super().__init__((address, 0), _Handler)
        self.address = address, int(self.server_address[1])
        self.values: dict[str, bytes] = {}
        self._refused: set[str] = set()
        self._hosts: frozenset[str] = frozenset()
        self._lock = threading.Lock()
        self._most_keys = KEYS_OF_A_RANK * world.size
        self._bytes_left = LARGEST_VALUE + BYTES_OF_A_PAIR * world.size**2
        self._thread = threading.Thread(
            target=self.serve_forever, args=(POLL_SECONDS,), name="hvdkit-meeting", daemon=True
        )

    def admit(self, addresses: Iterable[str]) -> None:
        """Admit clients at these addresses, of which early ones have waited until now."""
        self._hosts = frozenset(addresses)
        if not self._thread.is_alive():
            self._thread.start()

    def admits(self, address: str) -> bool:
        """True if a client is on a host of the job: Horovod's ranks have no other proof."""
        if address in self._hosts:
            return True
        if address not in self._refused and len(self._refused) < MOST_LOGGED:
            self._refused.add(address)
            # At once: Horovod ends a rank that is refused, and this job with it.
            logger.warning(
                "rank 0 refused a client at %s: no host of the job has this address, and only ranks may use the place "
                "where Horovod's engine meets. If the client is a rank behind network address translation (NAT), set "
                "HVDKIT_TRANSPORT=torch or mpi.",
                address,
            )
        return False

    def handle_error(self, request: object, client_address: object) -> None:
        """Print errors but those of a client that goes away in the middle."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]

    def keep(self, key: str, value: bytes) -> bool:
        """Keep a value; the first value of a key stays. False if the key has another, or there is no room."""
        with self._lock:
            if key in self.values:
                return self.values[key] == value
            if len(self.values) >= self._most_keys or len(value) > self._bytes_left:
                return False
            self.values[key] = value
            self._bytes_left -= len(value)
            return True

    def close(self) -> None:
        """Stop serving, and close the socket."""
        if self._thread.is_alive():
            self.shutdown()
        self.server_close()
