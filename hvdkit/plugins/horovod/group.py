"""What collectives on tensors ask of a process group and of a stream, by Horovod's engine and threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hvdkit.plugins.horovod.library import NativeHorovod
from hvdkit.transports.gpu.streams import Launch
from hvdkit.transports.waiters import Waiters

# Horovod passes numbers of elements and places among them on as C ints.
LARGEST = 1 << 30
EVERYONE = 0  # Horovod's process set of all ranks
# Horovod says that something failed, not who is lost. The transport below knows, at the latest after so long: of silent
# ranks Horovod's Gloo gives up after the same time-out, and ours may look a second later.
NAMING_SECONDS = 3.0

# The numbers of Horovod's C interface.
_OPS = ((dist.ReduceOp.SUM, 1), (dist.ReduceOp.MIN, 3), (dist.ReduceOp.MAX, 4), (dist.ReduceOp.PRODUCT, 5))


class ThreadEnd:
    """The end of what a thread was given to do."""

    def __init__(self) -> None:
        self._reached = threading.Event()
        self._failure = ""

    def reach(self, failure: str) -> None:
        """It has come to its end, or to a failure."""
        self._failure = failure
        self._reached.set()

    def query(self) -> bool:
        if not self._reached.is_set():
            return False
        if self._failure:
            raise RuntimeError(self._failure)
        return True

    def synchronize(self) -> None:
        self._reached.wait()
        self.query()


class Launches:
    """Runs what is launched, each on a thread of its own: none waits for another.

    Horovod puts together what ranks give it by name, in any order. So what must have one order on all ranks are the
    launches, which number the names, not the threads.
    """

    def __init__(self, label: str, native: NativeHorovod, waiters: Waiters, finished: Callable[[], None]) -> None:
        self._label = label
        self._native = native
        self._waiters = waiters
        self._finished = finished
        self._launched = 0
        self._here = threading.local()

    def mark(self, device: torch.device) -> Any:
        return None  # on the CPU, what a thread has done is done

    def launch(self, device: torch.device, after: Sequence[Any], tensors: list[Tensor], work: Launch) -> ThreadEnd:
        name, end = f"hvdkit.{self._label}.{self._launched}", ThreadEnd()
        self._launched += 1

        def run() -> None:
            self._here.name, self._here.operations = name, 0
            failure = ""
            try:
                with torch.no_grad():
                    work(_is_through)
            except Exception as error:  # whatever it is, the engine must learn of it
                cause = (str(error).splitlines() or [repr(error)])[0]
                failure = f"Horovod's engine gave {name} up: {cause}"
                self._native.stopping_within(NAMING_SECONDS)
            end.reach(failure)
            self._finished()

        self._waiters.run(run)
        return end

    def name(self) -> bytes:
        """A name for the next operation of the work that this thread is at."""
        self._here.operations += 1
        return f"{self._here.name}.{self._here.operations}".encode()


def _is_through(_: None) -> None:
    """What to do for an operation to end: it has, when a method of HorovodGroup comes back."""


class HorovodGroup:
    """All ranks of Horovod's engine, with the methods of a process group that TorchDeviceCollectives calls.

    Each blocks until its operation is through: it runs on a thread of the launch's own.
    """

    def __init__(self, native: NativeHorovod, launches: Launches, rank: int, size: int) -> None:
        self._native = native
        self._launches = launches
        self._rank = rank
        self._size = size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def allreduce(self, tensors: Sequence[Tensor], options: Any) -> None:
        flat, number = tensors[0], next(number for ours, number in _OPS if options.reduceOp == ours)
        # Horovod sums no 8 bits. What overflows them comes out the same, since only the upper bits are cut off.
        wide = flat.to(torch.int32) if flat.element_size() == 1 else flat
        for part in torch.split(wide, LARGEST):
            self._run("allreduce", part, part, 1, self._launches.name(), number, 1.0, 1.0, EVERYONE)
        if wide is not flat:
            flat.copy_(wide)

    def broadcast(self, tensors: Sequence[Tensor], options: Any) -> None:
        for part in torch.split(tensors[0], LARGEST):
            self._run("broadcast", part, part, options.rootRank, self._launches.name(), EVERYONE)

    def alltoall_base(self, output: Tensor, own: Tensor, *_splits: Sequence[int]) -> None:
        """Part p of ``own`` goes to rank p; part p of ``output`` comes from there."""
        output, own = _as_integers(output), _as_integers(own)
        count = own.numel() // self._size
        for begin, end in self._pieces(count):
            piece = own.view(self._size, count)[:, begin:end].contiguous().view(-1)
            came = output if end - begin == count else torch.empty_like(piece)
            splits = torch.full((self._size,), end - begin, dtype=torch.int32)
            self._run("alltoall", piece, splits, came, torch.empty_like(splits), self._launches.name(), EVERYONE)
            self._put(output, came, begin, end)

    def _allgather_base(self, output: Tensor, own: Tensor) -> None:
        output, own = _as_integers(output), _as_integers(own)
        for begin, end in self._pieces(own.numel()):
            came = output if end - begin == own.numel() else output.new_empty((end - begin) * self._size)
            self._run("allgather", own[begin:end], came, self._launches.name(), EVERYONE)
            self._put(output, came, begin, end)

    def _pieces(self, count: int) -> list[tuple[int, int]]:
        """``count`` elements of each rank in pieces of which Horovod can count those of all ranks."""
        step = max(1, LARGEST // self._size)
        return [(begin, min(begin + step, count)) for begin in range(0, count, step)]

    def _put(self, output: Tensor, came: Tensor, begin: int, end: int) -> None:
        if came is not output:
            output.view(self._size, -1)[:, begin:end].copy_(came.view(self._size, -1))

    def _run(self, kind: str, tensor: Tensor, *arguments: Any) -> None:
        """Give one operation to the engine, and wait for it."""
        function = f"horovod_torch_{kind}_async_{str(tensor.type()).replace('.', '_')}"
        self._native.wait(getattr(self._native.operations, function)(tensor, *arguments))


def _as_integers(flat: Tensor) -> Tensor:
    """The same memory in a type that Horovod moves: it knows no bfloat16."""
    return flat.view(torch.uint8 if flat.element_size() == 1 else torch.int16)
