"""Horovod's engine carries the buffers of PyTorch's CPU tensors; another transport carries the messages.

What Horovod's engine is given are fusion buffers, and allreduce, broadcast and allgather of all ranks. Its sums have an
order of their own: all ranks hold the same bits, but not those of another transport. Halves are exchanged by its
alltoall and allgather, and summed here, in fp32 and in rank order.

Process sets stay with our own algorithms. Horovod can only make one of its own with every rank of the job, members or
not; and where a rank is lost while there is one, its Gloo ends the other processes.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from hvdkit.environments.base import World
from hvdkit.environments.network import interface_of, own_addresses
from hvdkit.errors import TransportUnavailableError
from hvdkit.plugins.horovod.group import HorovodGroup, Launches, ThreadEnd
from hvdkit.plugins.horovod.library import NOT_INSTALLED, NativeHorovod, common_problem, load
from hvdkit.plugins.horovod.meeting import Meeting
from hvdkit.transports.base import DeviceCollectives, Exchange, Layer, Transfer, Transport
from hvdkit.transports.gpu.device import TorchDeviceCollectives
from hvdkit.transports.gpu.streams import DeviceTransfer
from hvdkit.transports.security.listening import addresses_for
from hvdkit.transports.waiters import Waiters

logger = logging.getLogger("hvdkit")

# Horovod's engine stops on all ranks within a few of its cycles of a millisecond, or waits for a lost one.
CLOSING_SECONDS = 5.0
# Each operation costs its ranks one or two of those cycles and a list of requests. Over its Gloo, the step of
# benchmarks/step.py takes 0.82 of what it takes with buckets of 4 MiB, and no less with larger ones.
WORTHWHILE_BYTES = 16 << 20


class HorovodTransport(Layer):
    """``inner`` for messages, and once ``start`` has been called, Horovod's engine for buffers.

    ``native_part``: the file of Horovod's library, None where there is none. ``required``: it is an error where
    Horovod's engine cannot be had.
    """

    def __init__(self, inner: Transport, native_part: Path | None, world: World, required: bool) -> None:
        super().__init__(inner)
        self.name = "horovod"
        self.host_types = frozenset({"cpu"})
        self.worthwhile_bytes = WORTHWHILE_BYTES
        self._native_part = native_part
        self._world = world
        self._required = required
        self._native: NativeHorovod | None = None
        self._waker: Callable[[], None] = lambda: None
        self._waiters = Waiters("hvdkit-horovod")

    def start(self, exchange: Exchange, start_seconds: float, silence_seconds: float) -> Transport:
        """Start Horovod's engine on all ranks, or, where one of them has no use of it, on none.

        Raises TransportUnavailableError on all ranks if it was asked for by name; else rank 0 says so. Raises it too
        where an engine does not start that was there on all ranks: what it left behind may end the process later.
        """
        super().start(exchange, start_seconds, silence_seconds)
        native, controller, problem = self._prepare()
        launched = list(self._world.launched)
        meeting, interface = None, ""
        try:
            if controller == "gloo" and not problem:
                try:
                    # Left to itself, Gloo takes what the host's own name stands for, which often is a loopback.
                    interface = interface_of(addresses_for(self._world)[0])
                    meeting = Meeting(self._world) if self.rank == 0 else None
                except (OSError, TransportUnavailableError) as error:
                    problem = f"there is no address where Horovod's ranks could meet: {error}"
            mine = {
                "problem": problem,
                "controller": controller,
                "meeting": meeting and meeting.address,
                "addresses": own_addresses(),
                "by_number": controller == "mpi" and native is not None and native.needs_ranks(launched),
            }
            reports = [json.loads(blob) for blob in exchange(json.dumps(mine).encode())]
            problem = common_problem(reports)
            if problem:
                return self._without(problem)
            assert native is not None, "a rank without the library has a problem"
            self._native = native
            if meeting is not None:
                meeting.admit(address for one in reports for address in one["addresses"])
            address = reports[0]["meeting"]
            members = launched if any(one["by_number"] for one in reports) else []
            problem = native.start(
                controller,
                self.rank,
                self.size,
                members,
                address and (address[0], address[1]),
                start_seconds,
                silence_seconds,
                interface,
            )
            outcomes = [blob.decode() for blob in exchange(problem.encode())]
        finally:
            if meeting is not None:
                meeting.close()
        problem = next((f"rank {rank}: {text}" for rank, text in enumerate(outcomes) if text), "")
        if problem:
            raise TransportUnavailableError(
                f"Horovod's engine did not start: {problem}.\n"
                "HINT: see what it printed, and whether hosts reach each other (HOROVOD_GLOO_IFACE, firewalls); "
                f"HVDKIT_TRANSPORT={self.carrier} goes without it."
            )
        self.device_types = self.inner.device_types | {"cpu"}
        return self

    def _prepare(self) -> tuple[NativeHorovod | None, str, str]:
        """The library, how its ranks shall talk, and what stands in the way on this rank."""
        if self._native_part is None:
            return None, "", NOT_INSTALLED
        try:
            native = load(self._native_part)
        except (AttributeError, ImportError, OSError) as error:
            cause = str(error).splitlines()[0]
            return None, "", f"Horovod's native part cannot be loaded; it was built for another PyTorch or MPI: {cause}"
        if self.inner.carrier == "mpi" and "mpi" in native.controllers:
            return native, "mpi", native.problem() or _mpi_problem()
        if "gloo" not in native.controllers:
            return native, "", "Horovod was built without Gloo, and MPI does not connect these ranks"
        return native, "gloo", native.problem()

    def _without(self, problem: str) -> Transport:
        if self._required:
            raise TransportUnavailableError(
                f"HVDKIT_TRANSPORT=horovod cannot be used: {problem}.\n"
                "HINT: build Horovod for this PyTorch on every host (HOROVOD_WITH_PYTORCH=1 pip install "
                "--no-build-isolation horovod), or unset HVDKIT_TRANSPORT."
            )
        if self.rank == 0 and problem != NOT_INSTALLED:
            logger.warning(
                "Horovod's engine is not used, tensors travel by hvdkit's own over %s: %s", self.carrier, problem
            )
        return self.inner

    def collectives_for(self, device: str, members: Sequence[int], label: str) -> DeviceCollectives | None:
        if device != "cpu":
            return super().collectives_for(device, members, label)
        if self._native is None or list(members) != list(range(self.size)):
            return None
        launches = Launches(label, self._native, self._waiters, lambda: self._waker())
        return TorchDeviceCollectives(HorovodGroup(self._native, launches, self.rank, self.size), _CPU, launches)

    def watch(self, transfers: Sequence[Transfer]) -> None:
        # What Horovod's engine carries calls the waker when it is done.
        others = [one for one in transfers if not (isinstance(one, DeviceTransfer) and isinstance(one.end, ThreadEnd))]
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


_CPU = torch.device("cpu")


def _mpi_problem() -> str:
    from mpi4py import MPI

    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        return "MPI was started without MPI_THREAD_MULTIPLE, and Horovod's engine calls it from a thread of its own"
    return ""
