"""Horovod's engine in this process, and a process group that it carries.

Horovod's Python is not loaded: ``import horovod`` may give hvdkit, and no process waits at its end without a deadline.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader, ModuleSpec
from importlib.util import module_from_spec
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

THREAD = "hvdkit-horovod-call"
_NAME = "mpi_lib_v2"  # Horovod's name of the library, from which its entry point has its name
SHORTEST_PAUSE, LONGEST_PAUSE = 50e-6, 1e-3
LARGEST = 1 << 30  # elements, bytes in an exchange: Horovod passes their numbers on as C ints
EVERYONE = 0  # Horovod's process set of all ranks
# The transport below names a lost rank within this time: its time-out is that of Horovod's Gloo, and a second may pass.
NAMING_SECONDS = 3.0
# The reason that is no surprise to a user who did not ask for Horovod.
NOT_INSTALLED = "Horovod is not installed with its native part for PyTorch"
# The numbers of Horovod's C interface.
_OPS = ((dist.ReduceOp.SUM, 1), (dist.ReduceOp.MIN, 3), (dist.ReduceOp.MAX, 4), (dist.ReduceOp.PRODUCT, 5))


def find_native_part() -> Path | None:
    """Return the file of Horovod's native part for PyTorch, None where Horovod was not built for it."""
    paths = (Path(folder, "horovod", "torch", _NAME + EXTENSION_SUFFIXES[0]) for folder in sys.path)
    return next(filter(Path.is_file, paths), None)


class NativeHorovod:
    """The library. A process has one, with one engine, which may be started again once it has stopped."""

    def __init__(self, path: Path) -> None:
        """Raises ImportError or OSError where it was built for another PyTorch or MPI than there is."""
        loader = ExtensionFileLoader(_NAME, str(path))
        self.operations: Any = module_from_spec(ModuleSpec(_NAME, loader, origin=str(path)))
        loader.exec_module(self.operations)
        self.calls = ctypes.CDLL(str(path))
        self.calls.horovod_init.restype = ctypes.c_bool
        assert self.calls.horovod_add_process_set, "an AttributeError: before 0.23, operations had other arguments"
        self.was_given_ranks = False  # the engine keeps the ranks of earlier jobs, so it must be given those of later
        self.stopping = threading.Event()
        self._stuck = ""
        self._shutdown: TimedCall[Any] | None = None

    def problem(self) -> str:
        """Return the reason why the engine cannot be started in this process; "" if it can."""
        if self._stuck:
            return self._stuck
        return "other code has started Horovod in this process" if self.calls.horovod_is_initialized() else ""

    def start(
        self, rank: int, size: int, members: list[int], timeout_seconds: float, environment: dict[str, str | None]
    ) -> str:
        """Start the engine with all ranks. Return "", or the reason why it failed.

        ``members``: the MPI ranks of this job, none for all of them. ``environment``: set during the start.
        """
        self.stopping.clear()
        self.was_given_ranks |= bool(members)
        self._shutdown = TimedCall(self.calls.horovod_shutdown, THREAD)
        numbers = (ctypes.c_int * len(members))(*members)
        start = TimedCall(lambda: bool(self.calls.horovod_init(numbers, len(members), None, None, 0)), THREAD)
        with for_a_while(environment):
            if not start.within(timeout_seconds):
                self._stuck = f"it was not ready after {timeout_seconds:g} s (HVDKIT_START_TIMEOUT_SECONDS)"
                return self._stuck
        if not start.result():
            return "it refused"
        place = self.calls.horovod_rank(), self.calls.horovod_size()
        if place != (rank, size):
            return f"it counts rank {rank} of {size} as rank {place[0]} of {place[1]}, so it uses another MPI"
        return ""

    def stop(self, timeout_seconds: float) -> None:
        """Stop the engine. Operations in flight fail, here and on all other ranks."""
        self.stopping.set()
        shutdown, self._shutdown = self._shutdown, None
        if not self._stuck and shutdown is not None and not shutdown.within(timeout_seconds):
            self._stuck = "Horovod's engine of a former job still waits for a rank that was lost"

    def run(self, kind: str, tensor: Tensor, *arguments: Any) -> None:
        """Run an operation of the engine, without a busy core as in Horovod's own wait. Raises RuntimeError."""
        function = f"horovod_torch_{kind}_async_{str(tensor.type()).replace('.', '_')}"
        handle = getattr(self.operations, function)(tensor, *arguments)
        pause = SHORTEST_PAUSE
        while not self.operations.horovod_torch_poll(handle):
            if self.stopping.is_set():
                raise RuntimeError("Horovod's engine was stopped on this rank")
            sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        self.operations.horovod_torch_wait_and_clear(handle)


@cache
def load(path: Path) -> NativeHorovod:
    """Return the library of this process. Raises ImportError or OSError where it cannot be loaded."""
    return NativeHorovod(path)


class LaunchEnd(Future[None]):
    """The end of a launch, in the place of a stream's event. Both methods raise RuntimeError where it failed."""

    def query(self) -> bool:
        return self.done() and self.result() is None

    def synchronize(self) -> None:
        self.result()


class HorovodGroup:
    """All ranks of Horovod's engine, in the places of a process group and of a stream of DeviceCollectives.

    Each launch runs on a thread of its own, which the methods of a process group block. Horovod matches operations by
    name, in any order: the launches, which number the names, must have one order on all ranks.
    """

    def __init__(
        self, native: NativeHorovod, rank: int, size: int, label: str, waiters: Waiters, finished: Callable[[], None]
    ) -> None:
        self._native, self._rank, self._size = native, rank, size
        self._label, self._waiters, self._finished = label, waiters, finished
        self._numbers = count()  # of the launches
        self._here = threading.local()  # of the thread of a launch: the names of its operations

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def mark(self, device: torch.device) -> Any:
        return None  # work of a thread on the CPU is done at once

    def launch(self, device: torch.device, after: Sequence[Any], tensors: list[Tensor], work: Launch) -> LaunchEnd:
        name, end = f"hvdkit.{self._label}.{next(self._numbers)}", LaunchEnd()

        def run() -> None:
            self._here.names = (f"{name}.{number}".encode() for number in count(1))
            try:
                with torch.no_grad():
                    work(lambda _: None)  # an operation has ended when its method returns
                end.set_result(None)
            except Exception as error:  # whatever it is, the engine must learn of it
                cause = (str(error).splitlines() or [repr(error)])[0]
                self._native.stopping.wait(NAMING_SECONDS)
                end.set_exception(RuntimeError(f"Horovod's engine gave up {name}: {cause}"))
            self._finished()

        self._waiters.run(run)
        return end

    def allreduce(self, tensors: Sequence[Tensor], options: Any) -> None:
        flat, number = tensors[0], next(number for op, number in _OPS if options.reduceOp == op)
        # Horovod sums no 8 bits. Sums that overflow come out the same, since only the upper bits are cut off.
        wide = flat.to(torch.int32) if flat.element_size() == 1 else flat
        for part in torch.split(wide, LARGEST):
            self._native.run("allreduce", part, part, 1, next(self._here.names), number, 1.0, 1.0, EVERYONE)
        if wide is not flat:
            flat.copy_(wide)

    def broadcast(self, tensors: Sequence[Tensor], options: Any) -> None:
        for part in torch.split(tensors[0], LARGEST):
            self._native.run("broadcast", part, part, options.rootRank, next(self._here.names), EVERYONE)

    def alltoall_base(self, output: Tensor, own: Tensor, *_splits: Sequence[int]) -> None:
        """Send part p of ``own`` to rank p, and fill part p of ``output`` from there."""
        self._exchange("alltoall", output, own, self._size)

    def _allgather_base(self, output: Tensor, own: Tensor) -> None:
        self._exchange("allgather", output, own, 1)

    def _exchange(self, kind: str, output: Tensor, own: Tensor, rows: int) -> None:
        """Exchange rows, in pieces of which Horovod can count those of all ranks."""
        step = max(1, LARGEST // self._size)
        # As bytes: Horovod knows no bfloat16.
        outputs = torch.split(output.view(torch.uint8).view(self._size, -1), step, dim=1)
        pieces = torch.split(own.view(torch.uint8).view(rows, -1), step, dim=1)
        for place, piece in zip(outputs, pieces, strict=True):
            received = place.contiguous()  # the place itself if there is a single piece, else memory for it
            splits = torch.full((rows,), piece.shape[1], dtype=torch.int32)
            arguments = (received.view(-1),) if rows == 1 else (splits, received.view(-1), torch.empty_like(splits))
            self._native.run(kind, piece.contiguous().view(-1), *arguments, next(self._here.names), EVERYONE)
            place.copy_(received)
