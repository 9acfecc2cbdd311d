"""Copies between tensors of a GPU and a block of host memory, on a stream of their own, beside the computation.

The block is page-locked, so that the GPU copies without the processor. The block may be memory of the node: its ranks
then sum in the memory that the GPU has written. A bucket is copied when it is complete, so that no hook waits for the
GPU: a blocking copy in each hook would delay the thread that launches kernels. The gain was not measured yet.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from time import monotonic, sleep
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hvdkit.kernels import BFLOAT16
from hvdkit.transports.base import HostCopies, Pairs, Transfer
from hvdkit.transports.gpu.streams import CudaStream, DeviceTransfer, End, Stream

logger = logging.getLogger("hvdkit")

NOT_LOCKED = (
    "the %d bytes of host memory in which gradients of GPUs are summed could not be page-locked, so that copies are "
    "slower: %s"
)
# Time that ``close`` waits for copies under way, which depend on this rank's own work on the GPU alone.
LAST_COPIES_SECONDS = 10.0

_never_unlocked: list[Any] = []  # memory that copies may still reach
_left_open: list[tuple[End | None, Any]] = []  # copies that were not closed; the next open_copies() unlocks them


def open_copies(device: str, block: Any) -> HostCopies:
    """Page-lock a block of bytes, and return copies between ``device`` ("cuda:0") and the block."""
    while _left_open:
        _unlock_after(*_left_open.pop())
    return StreamCopies(torch.device(device), CudaStream(), Locked(block, torch.device(device)))


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
                _clear_last_error(device)

    def close(self) -> None:
        """Unlock the memory, after the last copy."""
        if self.is_locked:
            self.is_locked = False
            self._cuda.cudaHostUnregister(self._address)
        self._block = None


def _clear_last_error(device: torch.device) -> None:
    """Clear CUDA's record of the last error, which PyTorch would raise for its next kernel."""
    try:
        torch.zeros(1, device=device)
    except RuntimeError as error:
        logger.debug("CUDA's last error was: %s", error)


class StreamCopies(HostCopies):
    """Copies on a stream. ``locked`` holds the block of the host until ``close``."""

    def __init__(self, device: torch.device, stream: Stream, locked: Any) -> None:
        self._device, self._stream, self._locked = device, stream, locked
        self._last: End | None = None

    def mark(self) -> Any:
        return self._stream.mark(self._device)

    def to_host(self, pairs: Pairs, after: Sequence[Any]) -> Transfer:
        hosts, tensors = _split(pairs)
        return self._launch(hosts, tensors, tensors, [mark for mark in after if mark is not None])

    def to_device(self, pairs: Pairs) -> Transfer:
        hosts, tensors = _split(pairs)
        return self._launch(tensors, hosts, tensors, [])

    def _launch(
        self, into: Sequence[Tensor], out_of: Sequence[Tensor], tensors: list[Tensor], after: list[Any]
    ) -> Transfer:
        def work(wait: Any) -> None:
            torch._foreach_copy_(list(into), list(out_of), non_blocking=True)

        with torch.no_grad():
            self._last = self._stream.launch(self._device, after, tensors, work)
        return DeviceTransfer(self._last, [*into, *out_of])

    def close(self) -> None:
        locked, self._locked = self._locked, None
        if locked is not None:
            _unlock_after(self._last, locked)

    def __del__(self) -> None:
        # Garbage collection may run during the capture of a CUDA graph, which a query of an event would end.
        if self._locked is not None:
            _left_open.append((self._last, self._locked))


def _unlock_after(last: End | None, locked: Any) -> None:
    deadline = monotonic() + LAST_COPIES_SECONDS
    while last is not None and not _is_over(last):
        if monotonic() > deadline:
            _never_unlocked.append(locked)
            return
        sleep(0.001)
    locked.close()


def _is_over(end: End) -> bool:
    try:
        return end.query()
    except RuntimeError:  # the device failed, and no longer copies
        return True


def _split(pairs: Pairs) -> tuple[list[Tensor], list[Tensor]]:
    return [as_tensor(array) for array, _ in pairs], [tensor for _, tensor in pairs]


def as_tensor(array: Any) -> Tensor:
    """Return a CPU tensor of an array's shape that shares its memory."""
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
