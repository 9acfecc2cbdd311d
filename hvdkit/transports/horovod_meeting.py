"""Where the ranks of Horovod's engine meet, if Gloo connects them: keys and values over HTTP, as Horovod's client asks.

Horovod's launcher has such a server, with the places of all ranks fixed in advance; other launchers have none. Rank 0
serves this one while the engine starts.
"""

from __future__ import annotations

import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from hvdkit.environments.base import World
from hvdkit.transports.listening import addresses_for

LARGEST_VALUE = 1 << 20  # bytes; Gloo's addresses take some hundred a rank
POLL_SECONDS = 0.02  # between two looks at whether to end
SILENCE_SECONDS = 10.0  # of a client


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = SILENCE_SECONDS

    def do_GET(self) -> None:
        value = self.server.values.get(self.path)
        self._answer(404 if value is None else 200, value or b"")

    def do_PUT(self) -> None:
        length = self.headers.get("Content-Length", "")
        if not length.isdigit() or int(length) > LARGEST_VALUE:
            self._answer(400, b"")
            return
        self.server.values[self.path] = self.rfile.read(int(length))
        self._answer(200, b"")

    def do_DELETE(self) -> None:
        """A client has got all it needs. Others may not have: values stay as long as the server."""
        self._answer(200, b"")

    def _answer(self, status: int, value: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(value)))
        self.end_headers()
        self.wfile.write(value)

    def log_message(self, format: str, *args: object) -> None:  # the name is the base class's
        """Nothing: standard error is the script's."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 1024  # all ranks come at once

    def __init__(self, address: str) -> None:
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        super().__init__((address, 0), _Handler)
        self.values: dict[str, bytes] = {}


class Meeting:
    """The server, from now until ``close``; ``place`` is its host and port as the other ranks see them."""

    def __init__(self, world: World) -> None:
        address = addresses_for(world)[0]
        self._server = _Server(address)
        self.place = address, int(self._server.server_address[1])
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(POLL_SECONDS,), name="hvdkit-meeting", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Serve no longer."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
