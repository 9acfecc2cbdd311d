"""Streams of a device, on which work runs in order beside the threads of the training script, and copies on them.

Copies are between tensors of a GPU and a block of host memory, which is page-locked, so that the GPU copies without the
processor. The block may be memory of the node, in which its ranks then sum. A bucket is copied when it is complete: a
blocking copy in each hook would delay the thread that launches kernels. The gain was not measured yet.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import monotonic, sleep
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from hvdkit.errors import PeerLostError
from hvdkit.kernels import BFLOAT16

logger = logging.getLogger("hvdkit")

CAPTURED = (
    "a CUDA graph cannot capture an operation of hvdkit, since threads of the host take part in it: each replay would "
    "use gradients of this rank alone.\n"
    "HINT: capture the model with torch.cuda.make_graphed_callables or torch.compile(mode='reduce-overhead'), and keep "
    "operations, backward() and optimizer.step() outside of your own graphs."
)
NOT_LOCKED = (
    "the %d bytes of host memory in which gradients of GPUs are summed could not be page-locked, which makes copies "
    "slower: %s"
)
# Seconds that ``close`` waits for copies under way, which depend on this rank's own work on the GPU alone.
LAST_COPIES_SECONDS = 10.0

Pairs = Sequence[tuple[Any, Any]]  # flat arrays in host memory, each with a flat tensor of as many elements
Wait = Callable[[Any], None]  # puts the work that follows on the stream behind a collective's work
Launch = Callable[[Wait], None]  # launches collectives and arithmetic on the stream


class End(Protocol):
    """The end of launched work."""

    def query(self) -> bool:
        """True if the work is over. Raises RuntimeError if it failed."""

    def synchronize(self) -> None:
        """Block until the work is over or failed."""


class Stream(Protocol):
    """A queue that runs launched work in order, beside the threads of the training script."""

    def mark(self, device: torch.device) -> Any:
        """Return a point in the calling thread's work on ``device``."""

    def launch(self, device: torch.device, after: Sequence[Any], tensors: list[Tensor], work: Launch) -> End:
        """Run ``work`` behind the marks ``after``. ``tensors`` belong to others and must outlive the work."""


def cuda_mark(device: torch.device) -> Any:
    """Return an event behind the calling thread's work on a GPU. Raises ValueError while a CUDA graph captures it."""
    if torch.cuda.is_current_stream_capturing():
        raise ValueError(CAPTURED)
    event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


class CudaEnd:
    """An event behind the last kernel, and the collectives before it, each of which NCCL may have given up."""

    def __init__(self, event: Any, works: list[Any]) -> None:
        self._event, self._works = event, works

    def query(self) -> bool:
        if not self._event.query():
            return False
        for work in self._works:
            # NCCL's watchdog notes a failure here before it aborts the kernel, so a wrong result is never taken.
            result = work.get_future_result() if hasattr(work, "get_future_result") else None
            if result is not None and result.done() and result.value() != 0:
                raise RuntimeError(f"NCCL gave up the operation (result {result.value()})")
        self._works.clear()
        return True

    def synchronize(self) -> None:
        self._event.synchronize()


class CudaStream:
    """A stream for each CUDA device that is used."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, Any] = {}

    mark = staticmethod(cuda_mark)

    def launch(self, device: torch.device, after: Sequence[Any], tensors: list[Tensor], work: Launch) -> End:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream = self._streams[device]
        works: list[Any] = []

        def wait(collective: Any) -> None:
            collective.wait()  # the stream waits, not this thread
            works.append(collective)

        with torch.cuda.stream(stream):  # selects the device as well
            for mark in after:
                stream.wait_event(mark)
            for tensor in tensors:
                tensor.record_stream(stream)
            work(wait)
            event: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            event.record(stream)
        return CudaEnd(event, works)


class DeviceTransfer:
    """The transfer of a launch. It waits for all ranks, so its peer is -1."""

    __slots__ = ("_tensors", "end", "peer")

    def __init__(self, end: End, tensors: list[Tensor]) -> None:
        self.peer = -1
        self.end = end
        self._tensors = tensors  # kernels read or write these until the end

    def done(self) -> bool:
        try:
            return self.end.query()
        except RuntimeError as error:
            raise collective_failed(error) from error

    def wait(self) -> None:
        """Block until done, on a waiter thread. ``done()`` raises an error."""
        with suppress(RuntimeError):
            self.end.synchronize()


def collective_failed(error: RuntimeError) -> PeerLostError:
    """Return the error of a collective that failed on the device."""
    return PeerLostError(f"the device's collective failed: {str(error).splitlines()[0]}")


_never_unlocked: list[Any] = []  # memory that copies may still reach
_left_open: list[tuple[End | None, Any]] = []  # copies that were not closed; the next open_copies() unlocks them


def open_copies(device: str, block: Any) -> HostCopies:
    """Page-lock a block of bytes, and return copies between ``device`` ("cuda:0") and the block."""
    while _left_open:
        _unlock_after(*_left_open.pop())
    return HostCopies(torch.device(device), CudaStream(), Locked(block, torch.device(device)))


class Locked:
    """Page-locked host memory; ordinary memory where the system or CUDA refuses to lock it."""

    def __init__(self, block: Any, device: torch.device) -> None:
        self._block = block  # keeps the memory mapped while it is locked
        self._address = block.__array_interface__["data"][0]
        self.is_locked = False
        if not block.nbytes:
            return
        with torch.cuda.device(device):
            self._cuda: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            status = self._cuda.cudaHostRegister(self._address, block.nbytes, 0)
            self.is_locked = int(status) == 0
            if not self.is_locked:
                logger.warning(NOT_LOCKED, block.nbytes, self._cuda.cudaGetErrorString(status))
                try:
                    torch.zeros(1, device=device)  # takes CUDA's record of the error, which a later kernel would raise
                except RuntimeError as error:
                    logger.debug("CUDA's last error was: %s", error)

    def close(self) -> None:
        """Unlock the memory, after the last copy."""
        if self.is_locked:
            self.is_locked = False
            self._cuda.cudaHostUnregister(self._address)
        self._block = None


class HostCopies:
    """Copies on a stream between tensors and host memory; ``locked`` holds that until ``close``, which alone blocks."""

    def __init__(self, device: torch.device, stream: Stream, locked: Any) -> None:
        self._device, self._stream, self._locked = device, stream, locked
        self._last: End | None = None

    def mark(self) -> Any:
        """Return a mark behind the work that the calling thread has given the device so far."""
        return self._stream.mark(self._device)

    def to_host(self, pairs: Pairs, after: Sequence[Any]) -> DeviceTransfer:
        """Copy tensors into their arrays, behind the marks ``after``, of which some may be None."""
        hosts, tensors = [as_tensor(array) for array, _ in pairs], [tensor for _, tensor in pairs]
        return self._launch(hosts, tensors, tensors, [mark for mark in after if mark is not None])

    def to_device(self, pairs: Pairs) -> DeviceTransfer:
        """Copy arrays into their tensors."""
        hosts, tensors = [as_tensor(array) for array, _ in pairs], [tensor for _, tensor in pairs]
        return self._launch(tensors, hosts, tensors, [])

    def _launch(
        self, into: list[Tensor], out_of: list[Tensor], tensors: list[Tensor], after: list[Any]
    ) -> DeviceTransfer:
        def work(wait: Wait) -> None:
            torch._foreach_copy_(into, out_of, non_blocking=True)

        with torch.no_grad():
            self._last = self._stream.launch(self._device, after, tensors, work)
        return DeviceTransfer(self._last, [*into, *out_of])

    def close(self) -> None:
        """Wait for the copies under way, and release the host's memory. Nothing can be copied afterwards."""
        locked, self._locked = self._locked, None
        if locked is not None:
            _unlock_after(self._last, locked)

    def __del__(self) -> None:
        # Garbage collection may run during the capture of a CUDA graph, which a query of an event would end.
        if self._locked is not None:
            _left_open.append((self._last, self._locked))


def _unlock_after(last: End | None, locked: Any) -> None:
    deadline = monotonic() + LAST_COPIES_SECONDS
    with suppress(RuntimeError):  # the device failed, and no longer copies
        while last is not None and not last.query():
            if monotonic() > deadline:
                _never_unlocked.append(locked)
                return
            sleep(0.001)
    locked.close()


def as_tensor(array: Any) -> Tensor:
    """Return a CPU tensor of an array's shape that shares its memory."""
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
