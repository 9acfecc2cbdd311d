"""Horovod's engine in this process, without Horovod's Python, and a process group that it carries."""

from __future__ import annotations

import ctypes
import importlib.util
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from functools import cache, partial
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader, ModuleSpec
from itertools import count
from pathlib import Path
from time import sleep
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hvdkit.environments.libraries import for_a_while
from hvdkit.transports.gpu.streams import Launch
from hvdkit.transports.waiters import TimedCall, Waiters

_NAME = "mpi_lib_v2"  # Horovod's name of the library, from which its entry point has its name
LARGEST = 1 << 30  # elements: Horovod passes their numbers on as C ints
_EVERYONE = 0  # Horovod's process set of all ranks
_NAMING_SECONDS = 3.0  # for the transport below, which has the time-out of Horovod's Gloo, to name a lost rank
# The numbers of Horovod's C interface.
_OPS = ((dist.ReduceOp.SUM, 1), (dist.ReduceOp.MIN, 3), (dist.ReduceOp.MAX, 4), (dist.ReduceOp.PRODUCT, 5))
NOT_INSTALLED = "Horovod is not installed with its native part for PyTorch"


def find_native_part() -> Path | None:
    """Return the file of Horovod's native part for PyTorch, None where Horovod was not built for it."""
    paths = (Path(folder, "horovod", "torch", _NAME + EXTENSION_SUFFIXES[0]) for folder in sys.path)
    return next(filter(Path.is_file, paths), None)


class NativeHorovod:
    """The library. A process has one, with one engine, which may be started again once it has stopped.

    Raises ImportError or OSError where it was built for another PyTorch or MPI than there is.
    """

    def __init__(self, path: Path) -> None:
        loader = ExtensionFileLoader(_NAME, str(path))
        self.operations: Any = importlib.util.module_from_spec(ModuleSpec(_NAME, loader, origin=str(path)))
        loader.exec_module(self.operations)
        self._calls = ctypes.CDLL(str(path))
        self._calls.horovod_init.restype = ctypes.c_bool
        assert self._calls.horovod_add_process_set, "an AttributeError: before 0.23, operations had other arguments"
        self._stuck, self.was_given_ranks, self.stopping = "", False, threading.Event()
        self._shutdown: TimedCall[Any] | None = None

    def controller(self, carrier: str) -> tuple[str, str]:
        """Return the way in which the ranks talk, "mpi" or "gloo", and the obstacle to a start, "" if there is none."""
        by_mpi, obstacle = carrier == "mpi" and bool(self._calls.horovod_mpi_built()), self._stuck
        if not by_mpi and not self._calls.horovod_gloo_built():
            obstacle = "Horovod was built without Gloo, and MPI does not connect these ranks"
        elif not self._stuck and self._calls.horovod_is_initialized():
            obstacle = "Horovod was started in this process by somebody else"
        return "mpi" if by_mpi else "gloo", obstacle

    def start(self, rank: int, size: int, members: list[int], seconds: float, variables: dict[str, str | None]) -> str:
        """Start the engine with all ranks. Return "", or the reason why it failed.

        ``members``: the MPI ranks of this job, none for all of them. ``variables``: of the environment, for the start.
        """
        self.stopping.clear()
        self.was_given_ranks |= bool(members)
        self._shutdown = TimedCall(self._calls.horovod_shutdown, "hvdkit-horovod-stop")
        numbers = (ctypes.c_int * len(members))(*members)
        init = partial(self._calls.horovod_init, numbers, len(members), None, None, 0)
        start = TimedCall(init, "hvdkit-horovod-start")
        with for_a_while(variables):
            if not start.within(seconds):
                self._stuck = f"it was not ready after {seconds:g} s (HVDKIT_START_TIMEOUT_SECONDS)"
                return self._stuck
        if not start.result():
            return "it refused"
        place = self._calls.horovod_rank(), self._calls.horovod_size()
        if place != (rank, size):
            return f"it takes rank {rank} of {size} for rank {place[0]} of {place[1]}, so it uses another MPI"
        return ""

    def stop(self, timeout_seconds: float) -> None:
        """Stop the engine. Operations in flight fail, here and on all other ranks."""
        self.stopping.set()
        if not self._stuck and self._shutdown is not None and not self._shutdown.within(timeout_seconds):
            self._stuck = "Horovod's engine of a former job still waits for a rank that was lost"

    def run(self, kind: str, tensor: Tensor, *arguments: Any) -> None:
        """Run an operation, without a busy core as in Horovod's own wait. Raises RuntimeError."""
        start = getattr(self.operations, f"horovod_torch_{kind}_async_{str(tensor.type()).replace('.', '_')}")
        handle, pause = start(tensor, *arguments), 50e-6
        while not self.operations.horovod_torch_poll(handle):
            if self.stopping.is_set():
                raise RuntimeError("Horovod's engine was stopped on this rank")
            sleep(pause)
            pause = min(2 * pause, 1e-3)
        self.operations.horovod_torch_wait_and_clear(handle)


load = cache(NativeHorovod)  # the library of this process


class LaunchEnd(Future[None]):
    """The end of a launch, in the place of a stream's event. Both methods raise RuntimeError where it failed."""

    def query(self) -> bool:
        return self.done() and self.result() is None

    def synchronize(self) -> None:
        self.result()


class HorovodGroup:
    """All ranks of Horovod's engine, in the places of a process group and of a stream of TorchDeviceCollectives.

    Each launch runs on a thread of its own, which the methods of a process group block. Horovod matches operations by
    name, in any order: the launches, which number the names, must have one order on all ranks.
    """

    def __init__(self, native: NativeHorovod, rank: int, size: int, label: str, waiters: Waiters) -> None:
        self._native, self._rank, self._size, self._waiters = native, rank, size, waiters
        self._names = (f"hvdkit.{label}.{number}" for number in count())  # of launches
        self._here = threading.local()  # of the thread of a launch: the names of its operations

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def mark(self, device: torch.device) -> Any:
        return None  # work of a thread on the CPU is done at once

    def launch(self, device: torch.device, after: Sequence[Any], tensors: list[Tensor], work: Launch) -> LaunchEnd:
        name, end = next(self._names), LaunchEnd()

        def run() -> None:
            self._here.names = (f"{name}.{number}".encode() for number in count(1))
            try:
                with torch.no_grad():
                    work(lambda _: None)  # an operation has ended when its method returns
                end.set_result(None)
            except Exception as error:  # whatever it is, the engine must learn of it
                cause = (str(error).splitlines() or [repr(error)])[0]
                self._native.stopping.wait(_NAMING_SECONDS)
                end.set_exception(RuntimeError(f"Horovod's engine gave {name} up: {cause}"))

        self._waiters.run(run)
        return end

    def allreduce(self, tensors: Sequence[Tensor], options: Any) -> None:
        flat, number = tensors[0], next(number for op, number in _OPS if options.reduceOp == op)
        # Horovod sums no 8 bits. Sums that overflow come out the same, since only the upper bits are cut off.
        wide = flat.to(torch.int32) if flat.element_size() == 1 else flat
        for part in torch.split(wide, LARGEST):
            self._native.run("allreduce", part, part, 1, next(self._here.names), number, 1.0, 1.0, _EVERYONE)
        if wide is not flat:
            flat.copy_(wide)

    def broadcast(self, tensors: Sequence[Tensor], options: Any) -> None:
        for part in torch.split(tensors[0], LARGEST):
            self._native.run("broadcast", part, part, options.rootRank, next(self._here.names), _EVERYONE)

    def alltoall_base(self, output: Tensor, own: Tensor, *_splits: Sequence[int]) -> None:
        """Send part p of ``own`` to rank p, and fill part p of ``output`` from there."""
        self._exchange("alltoall", output, own, self._size)

    def _allgather_base(self, output: Tensor, own: Tensor) -> None:
        self._exchange("allgather", output, own, 1)

    def _exchange(self, kind: str, output: Tensor, own: Tensor, rows: int) -> None:
        """Exchange rows of elements, as it knows no bfloat16, in pieces that it can count on all ranks."""
        output, own = (flat.view(torch.uint8 if flat.element_size() == 1 else torch.int16) for flat in (output, own))
        elements, step = own.numel() // rows, max(1, LARGEST // self._size)
        pieces = (torch.split(flat, step, 1) for flat in (own.view(rows, elements), output.view(self._size, elements)))
        for piece, part in zip(*pieces, strict=True):
            received = part.contiguous()  # the output itself where the piece is whole
            splits = torch.full((rows,), piece.shape[1], dtype=torch.int32)
            arguments = (received.view(-1),) if rows == 1 else (splits, received.view(-1), torch.empty_like(splits))
            self._native.run(kind, piece.contiguous().view(-1), *arguments, next(self._here.names), _EVERYONE)
            if received.data_ptr() != part.data_ptr():
                part.copy_(received)
