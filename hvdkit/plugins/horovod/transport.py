"""The transport by Horovod's engine, and the key-value server on rank 0 where Gloo's ranks of that engine meet."""

from __future__ import annotations

import json
import logging
import socket
import sys
import threading
from collections.abc import Iterable, Sequence
from contextlib import closing, nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch

from hvdkit.environments.base import World
from hvdkit.environments.libraries import horovod_variables
from hvdkit.environments.network import interface_of, own_addresses
from hvdkit.errors import TransportUnavailableError
from hvdkit.plugins.horovod.engine import NOT_INSTALLED, HorovodGroup, NativeHorovod, load
from hvdkit.transports.base import DeviceCollectives, Exchange, Layer, Transport
from hvdkit.transports.gpu.device import TorchDeviceCollectives
from hvdkit.transports.security.listening import addresses_for
from hvdkit.transports.waiters import Waiters

logger = logging.getLogger("hvdkit")

_CLOSING_SECONDS = 5.0  # the engine stops within a few of its cycles of a millisecond, or waits for a lost rank
# Each operation costs its ranks one or two of those cycles and a list of requests. Over its Gloo, the step of
# benchmarks/step.py takes 0.82 of the time with buckets of 4 MiB, and no less with larger ones.
_WORTHWHILE_BYTES = 16 << 20
LARGEST_VALUE = 1 << 20  # bytes
_BYTES_OF_A_PAIR = 512  # of ranks: Gloo's addresses take 136 bytes, in two groups
_KEYS_OF_A_RANK = 16  # Gloo has one for each of its three groups


class HorovodTransport(Layer):
    """``inner`` for messages, and once ``start`` has been called, Horovod's engine for buffers.

    ``native_part``: the file of Horovod's library, if there is one. ``required``: the user asked for it by name.
    """

    def __init__(self, inner: Transport, native_part: Path | None, world: World, required: bool) -> None:
        super().__init__(inner)
        self.name = "horovod"
        self.host_types = frozenset({"cpu"})
        self.worthwhile_bytes = _WORTHWHILE_BYTES
        self._native_part, self._world, self._required = native_part, world, required
        self._native: NativeHorovod | None = None
        self._waiters = Waiters("hvdkit-horovod")

    def start(self, exchange: Exchange, start_seconds: float, silence_seconds: float) -> Transport:
        """Start Horovod's engine on all ranks, or, where some rank cannot use it, on none: then rank 0 warns.

        Raises TransportUnavailableError on all ranks if the user requires the engine, or if an engine that all ranks
        have does not start, since its remains may end the process later.
        """
        super().start(exchange, start_seconds, silence_seconds)
        report = self._report()
        by_gloo = report["controller"] == "gloo" and not report["problem"]
        server = KeyValueServer(self._world) if by_gloo and self.rank == 0 else None
        with nullcontext() if server is None else closing(server):
            report |= {"meeting": server and server.address, "addresses": own_addresses()}
            reports = [json.loads(blob) for blob in exchange(json.dumps(report).encode())]
            if problem := common_problem(reports):
                if self._required:
                    raise TransportUnavailableError(
                        f"HVDKIT_TRANSPORT=horovod cannot be used: {problem}.\n"
                        "HINT: build Horovod for this PyTorch on every host (HOROVOD_WITH_PYTORCH=1 pip install "
                        "--no-build-isolation horovod), or unset HVDKIT_TRANSPORT."
                    )
                if self.rank == 0 and problem != NOT_INSTALLED:
                    logger.warning("Horovod's engine is not used, hvdkit's own goes over %s: %s", self.carrier, problem)
                return self.inner
            assert self._native is not None, "a rank without the library has a problem"
            if server is not None:
                server.admit(address for report in reports for address in report["addresses"])
            members = list(self._world.launched) if any(report["needs_ranks"] for report in reports) else []
            # Without an interface, Gloo takes the address of the host's own name, which often is a loopback.
            interface = interface_of(addresses_for(self._world)[0]) if by_gloo else ""
            place = report["controller"], self.rank, self.size, reports[0]["meeting"]
            environment = horovod_variables(*place, silence_seconds, interface)
            problem = self._native.start(self.rank, self.size, members, start_seconds, environment)
            outcomes = [blob.decode() for blob in exchange(problem.encode())]
        if problem := next((f"rank {rank}: {text}" for rank, text in enumerate(outcomes) if text), ""):
            raise TransportUnavailableError(
                f"Horovod's engine did not start: {problem}.\n"
                "HINT: see what it printed, and whether hosts reach each other (HOROVOD_GLOO_IFACE, firewalls); "
                f"HVDKIT_TRANSPORT={self.carrier} goes without it."
            )
        self.device_types = self.inner.device_types | {"cpu"}
        return self

    def _report(self) -> dict[str, Any]:
        """Load the library. Return what the other ranks must know: the way of the ranks to talk, or the obstacle."""
        report: dict[str, Any] = {"controller": "", "problem": NOT_INSTALLED, "needs_ranks": False}
        if self._native_part is None:
            return report
        try:
            self._native = load(self._native_part)
        except (AttributeError, ImportError, OSError) as error:
            cause = f"it was built for another PyTorch or MPI: {str(error).splitlines()[0]}"
            return report | {"problem": f"Horovod's native part cannot be loaded; {cause}"}
        report["controller"], report["problem"] = self._native.controller(self.inner.carrier)
        if report["controller"] == "mpi":
            from mpi4py import MPI

            # It takes all of MPI's ranks by itself, without a question to mpirun, but keeps the ranks of earlier jobs.
            is_all_of_mpi = list(self._world.launched) == list(range(MPI.COMM_WORLD.Get_size()))
            report["needs_ranks"] = self._native.was_given_ranks or not is_all_of_mpi
            if not report["problem"] and MPI.Query_thread() < MPI.THREAD_MULTIPLE:
                report["problem"] = "MPI has no MPI_THREAD_MULTIPLE, and Horovod's engine calls it from its own thread"
        return report

    def collectives_for(self, device: str, members: Sequence[int], label: str) -> DeviceCollectives | None:
        if device != "cpu":
            return super().collectives_for(device, members, label)
        if self._native is None or list(members) != list(range(self.size)):
            return None
        group = HorovodGroup(self._native, self.rank, self.size, label, self._waiters)
        return TorchDeviceCollectives(group, torch.device("cpu"), group)

    def close(self, graceful: bool) -> None:
        if self._native is not None:
            self._native.stop(_CLOSING_SECONDS)
        self._waiters.close(timeout_seconds=1.0)
        super().close(graceful)


def common_problem(reports: Sequence[dict[str, Any]]) -> str:
    """Return the obstacle to Horovod's engine, from the reports of all ranks; "" if there is none."""
    problems = [str(report["problem"]) for report in reports]
    if first := next(filter(None, problems), ""):
        return first if problems.count(first) == len(problems) else f"rank {problems.index(first)}: {first}"
    controllers = [report["controller"] for report in reports]
    return f"Horovod was built in different ways: ranks talk by {controllers}" if len(set(controllers)) > 1 else ""


class _Handler(BaseHTTPRequestHandler):
    server: KeyValueServer
    timeout = 10.0  # seconds of silence

    def do_GET(self) -> None:
        """Answer a request: a key keeps its first value, even if a client deletes it, since others may need it."""
        status, value = 200, b""
        if not self.server.admits(str(self.client_address[0]).partition("%")[0]):
            status = 403
        elif self.command == "PUT":
            length = self.headers.get("Content-Length", "")
            nbytes = int(length) if length.isdigit() else LARGEST_VALUE + 1
            given = self.rfile.read(nbytes) if nbytes <= LARGEST_VALUE else b""
            if len(given) < nbytes:  # too long, or cut off in the middle: the client will try again
                status = 400
            elif not self.server.keep(self.path, given):
                status = 409
        elif self.command == "GET":
            kept = self.server.values.get(self.path)
            status, value = (404, b"") if kept is None else (200, kept)
        self.send_response(status)
        self.send_header("Content-Length", str(len(value)))
        self.end_headers()
        self.wfile.write(value)

    do_PUT = do_DELETE = do_GET  # noqa: N815 (names of the base class)

    def log_message(self, format: str, *args: object) -> None:
        pass


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
        self._thread: threading.Thread | None = None
        self._hosts, self._refused, self._lock = set[str](), set[str](), threading.Lock()
        self._most_keys = _KEYS_OF_A_RANK * world.size
        self._bytes_left = LARGEST_VALUE + _BYTES_OF_A_PAIR * world.size**2

    def admit(self, addresses: Iterable[str]) -> None:
        """Admit clients at these addresses. Clients that came before have waited for this."""
        self._hosts.update(addresses)
        if self._thread is None:
            self._thread = threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True)  # looks for the end
            self._thread.start()

    def admits(self, address: str) -> bool:
        """True if a client is on a host of the job: Horovod's ranks have no other proof."""
        if address not in self._hosts | self._refused:
            self._refused.add(address)
            hint = "If it is a rank behind a translation of addresses, set HVDKIT_TRANSPORT=torch or mpi."
            logger.warning("rank 0 refused a client at %s, where no rank of the job is.\nHINT: %s", address, hint)
        return address in self._hosts

    def handle_error(self, request: object, client_address: object) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):  # a client that goes away in the middle
            super().handle_error(request, client_address)  # type: ignore[arg-type]

    def keep(self, key: str, value: bytes) -> bool:
        """Keep the first value of a key. True if ``value`` is at the key from now on."""
        with self._lock:
            if key not in self.values and len(self.values) < self._most_keys and len(value) <= self._bytes_left:
                self.values[key] = value
                self._bytes_left -= len(value)
            return self.values.get(key) == value

    def close(self) -> None:
        if self._thread is not None:
            self.shutdown()
        self.server_close()
