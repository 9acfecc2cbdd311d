"""Horovod's engine carries the buffers of PyTorch's CPU tensors; another transport carries the messages."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import torch

from hvdkit.environments.base import World
from hvdkit.environments.libraries import horovod_variables
from hvdkit.environments.network import interface_of, own_addresses
from hvdkit.errors import TransportUnavailableError
from hvdkit.plugins.horovod.engine import NOT_INSTALLED, HorovodGroup, LaunchEnd, NativeHorovod, load
from hvdkit.transports.base import Exchange, Layer, Transfer, Transport
from hvdkit.transports.gpu.device import DeviceCollectives
from hvdkit.transports.security.key_value_server import KeyValueServer
from hvdkit.transports.security.listening import addresses_for
from hvdkit.transports.waiters import Waiters

logger = logging.getLogger("hvdkit")

# Horovod's engine stops on all ranks within a few of its cycles of a millisecond, or waits for a lost rank.
CLOSING_SECONDS = 5.0
# Each operation costs its ranks one or two of those cycles and a list of requests. Over its Gloo, the step of
# benchmarks/step.py takes 0.82 of the time with buckets of 4 MiB, and no less with larger ones.
WORTHWHILE_BYTES = 16 << 20


class HorovodTransport(Layer):
    """``inner`` for messages, and once ``start`` has been called, Horovod's engine for buffers.

    ``native_part``: the file of Horovod's library, None where there is none. ``required``: it is an error where
    Horovod's engine is not available.
    """

    def __init__(self, inner: Transport, native_part: Path | None, world: World, required: bool) -> None:
        super().__init__(inner)
        self.name = "horovod"
        self.host_types = frozenset({"cpu"})
        self.worthwhile_bytes = WORTHWHILE_BYTES
        self._native_part, self._world, self._required = native_part, world, required
        self._native: NativeHorovod | None = None
        self._waker: Callable[[], None] = lambda: None
        self._waiters = Waiters("hvdkit-horovod")

    def start(self, exchange: Exchange, start_seconds: float, silence_seconds: float) -> Transport:
        """Start Horovod's engine on all ranks, or, where some rank cannot use it, on none.

        Raises TransportUnavailableError on all ranks if the user asked for it by name, else rank 0 warns. Raises it too
        where an engine that all ranks have does not start, since its remains may end the process later.
        """
        super().start(exchange, start_seconds, silence_seconds)
        server: KeyValueServer | None = None
        try:
            own, server = self._prepare()
        except TransportUnavailableError as error:  # the other ranks wait for this rank's report
            own = {"problem": str(error)}
        with nullcontext() if server is None else closing(server):
            reports = [json.loads(blob) for blob in exchange(json.dumps(own).encode())]
            if problem := common_problem(reports):
                self._native = None  # another session may use it
                return self._without(problem)
            assert self._native is not None, "a rank without the library has a problem"
            if server is not None:
                server.admit(address for report in reports for address in report["addresses"])
            members = list(self._world.launched) if any(report["by_number"] for report in reports) else []
            environment = horovod_variables(
                own["controller"], self.rank, self.size, reports[0]["meeting"], silence_seconds, own["interface"]
            )
            problem = self._native.start(self.rank, self.size, members, start_seconds, environment)
            outcomes = [blob.decode() for blob in exchange(problem.encode())]
        if problem := next((f"rank {rank}: {text}" for rank, text in enumerate(outcomes) if text), ""):
            raise TransportUnavailableError(
                f"Horovod's engine did not start: {problem}.\n"
                "HINT: see what it printed, and whether hosts reach each other (HOROVOD_GLOO_IFACE, firewalls); "
                f"HVDKIT_TRANSPORT={self.carrier} works without it."
            )
        self.device_types = self.inner.device_types | {"cpu"}
        return self

    def _prepare(self) -> tuple[dict[str, Any], KeyValueServer | None]:
        """Load the library. Return what the other ranks must know, and rank 0's server where Gloo's ranks meet.

        Raises TransportUnavailableError with the obstacle of this rank.
        """
        if self._native_part is None:
            raise TransportUnavailableError(NOT_INSTALLED)
        try:
            self._native = native = load(self._native_part)
        except (AttributeError, ImportError, OSError) as error:
            cause = f"it was built for another PyTorch or MPI: {str(error).splitlines()[0]}"
            raise TransportUnavailableError(f"Horovod's native part cannot be loaded; {cause}") from error
        if problem := native.problem():
            raise TransportUnavailableError(problem)
        report = {"problem": "", "addresses": own_addresses(), "by_number": False, "meeting": None, "interface": ""}
        if self.inner.carrier == "mpi" and native.calls.horovod_mpi_built():
            from mpi4py import MPI

            if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
                fact = "MPI was started without MPI_THREAD_MULTIPLE"
                raise TransportUnavailableError(f"{fact}, and Horovod's engine calls it from a thread of its own")
            # Horovod takes all of MPI's ranks by itself, for which Open MPI need not ask mpirun.
            are_all = list(self._world.launched) == list(range(MPI.COMM_WORLD.Get_size()))
            return report | {"controller": "mpi", "by_number": native.was_given_ranks or not are_all}, None
        if not native.calls.horovod_gloo_built():
            raise TransportUnavailableError("Horovod was built without Gloo, and MPI does not connect these ranks")
        try:
            # Without an interface, Gloo takes the address of the host's own name, which often is a loopback.
            interface = interface_of(addresses_for(self._world)[0])
            server = KeyValueServer(self._world) if self.rank == 0 else None
        except (OSError, TransportUnavailableError) as error:
            raise TransportUnavailableError(f"there is no address where Horovod's ranks could meet: {error}") from error
        meeting = None if server is None else server.address
        return report | {"controller": "gloo", "meeting": meeting, "interface": interface}, server

    def _without(self, problem: str) -> Transport:
        """Return the transport below. Raises TransportUnavailableError if the user asked for Horovod's engine."""
        if self._required:
            raise TransportUnavailableError(
                f"HVDKIT_TRANSPORT=horovod cannot be used: {problem}.\n"
                "HINT: build Horovod for this PyTorch on every host (HOROVOD_WITH_PYTORCH=1 pip install "
                "--no-build-isolation horovod), or unset HVDKIT_TRANSPORT."
            )
        if self.rank == 0 and problem != NOT_INSTALLED:
            logger.warning(
                "Horovod's engine is not used (%s); hvdkit's own engine sends tensors over %s", problem, self.carrier
            )
        return self.inner

    def collectives_for(self, device: str, members: Sequence[int], label: str) -> DeviceCollectives | None:
        if device != "cpu":
            return super().collectives_for(device, members, label)
        if self._native is None or list(members) != list(range(self.size)):
            return None
        group = HorovodGroup(self._native, self.rank, self.size, label, self._waiters, lambda: self._waker())
        return DeviceCollectives(group, torch.device("cpu"), group)

    def watch(self, transfers: Sequence[Transfer]) -> None:
        # The end of a launch calls the waker.
        others = [transfer for transfer in transfers if not isinstance(getattr(transfer, "end", None), LaunchEnd)]
        if others:
            super().watch(others)

    def set_waker(self, waker: Callable[[], None]) -> None:
        self._waker = waker
        super().set_waker(waker)

    def close(self, graceful: bool) -> None:
        native, self._native = self._native, None
        if native is not None:
            native.stop(CLOSING_SECONDS)
        self._waiters.close(timeout_seconds=1.0)
        self._waker = lambda: None
        super().close(graceful)


def common_problem(reports: Sequence[dict[str, Any]]) -> str:
    """Return the obstacle to Horovod's engine, from the reports of all ranks; "" if there is none."""
    problems = [str(report["problem"]) for report in reports]
    if len(set(problems)) == 1 and problems[0]:
        return problems[0]
    for rank, problem in enumerate(problems):
        if problem:
            return f"rank {rank}: {problem}"
    controllers = [report["controller"] for report in reports]
    if len(set(controllers)) > 1:
        return f"Horovod was built in different ways: its ranks would communicate by {controllers}"
    return ""
