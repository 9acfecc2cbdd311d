"""Memory of tensors as flat arrays, and tensors' memory in the arena."""

from __future__ import annotations

import ctypes
from collections import Counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hvdkit.arena import ARENA, SMALLEST_BYTES
from hvdkit.engine.loop.completion import Completion
from hvdkit.kernels.dtypes import DTYPES, Array

_DTYPES = {getattr(torch, name): dtype for name, dtype in DTYPES.items()}
_BYTES = np.dtype(np.uint8)

SIZES_KEPT = 256


def bytes_of(function: str, tensor: Tensor) -> Array:
    """Return a tensor's memory as a flat array of bytes."""
    return _memory_of(function, tensor, _BYTES)


def array_of(function: str, tensor: Tensor) -> Array:
    """Return a tensor's memory as a flat array that the kernels can reduce. Raises TypeError for other dtypes."""
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        raise TypeError(f"{function}: tensors of {tensor.dtype} cannot be reduced")
    return _memory_of(function, tensor, dtype)


def _memory_of(function: str, tensor: Tensor, dtype: Any) -> Array:
    """Return a tensor's memory. Raises ValueError unless the tensor is contiguous and on the CPU."""
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        raise ValueError(
            f"{function}: expected a dense tensor on the CPU, got {tensor.layout} on {tensor.device}\n"
            "HINT: give tensor.to_dense(), or tensor.cpu()."
        )
    if not tensor.is_contiguous():
        raise ValueError(
            f"{function}: expected a contiguous tensor, got one of shape {tuple(tensor.shape)} with strides "
            f"{tensor.stride()}\nHINT: give tensor.contiguous(), or tensor.T.contiguous() for a result."
        )
    nbytes = tensor.numel() * tensor.element_size()
    # Not by ``tensor.numpy()``, after which a storage cannot be resized any more: FSDP frees memory by that.
    memory: Any = (ctypes.c_char * nbytes).from_address(tensor.data_ptr())
    memory.owner = tensor  # which lives as long as the array
    return np.frombuffer(memory, dtype=dtype) if nbytes else np.empty(0, dtype)


class Adoption:
    """The buffers of collectives that move into the arena, where the other ranks of the node read and write them.

    FSDP makes buffers anew for each use, and always of the same sizes: from the second one on, buffers of that size
    are made in the arena. DDP makes its buckets once: the second time that a backward pass uses one, its storage gets
    other memory of the same size, out of the arena; the tensors that are views of it follow.
    """

    def __init__(self) -> None:
        self._sizes: dict[int, bool] = {}  # of storages that were seen; True if they are made in the arena
        self._is_served = not ARENA.serve_torch()
        self._in_flight: Counter[int] = Counter()  # operations by address, whose memory must stay

    def keep(self, array: Array, operation: Completion) -> None:
        """Let no storage be adopted at the address of an array until an operation is over."""
        if not self._is_served or array.nbytes < SMALLEST_BYTES:
            return
        address = array.__array_interface__["data"][0]
        self._in_flight[address] += 1

        def release(operation: Completion) -> None:
            self._in_flight[address] -= 1
            if not self._in_flight[address]:
                del self._in_flight[address]

        operation.call_when_done(release)

    def see(self, tensor: Tensor, adopts: bool = False) -> None:
        """Note that a collective uses a tensor, whose storage may move into the arena if it ``adopts``."""
        if not self._is_served or tensor.numel() * tensor.element_size() < SMALLEST_BYTES:
            return
        storage = tensor.untyped_storage()
        nbytes, address = storage.nbytes(), storage.data_ptr()
        if ARENA.contains(address):
            return
        if nbytes not in self._sizes:
            if len(self._sizes) < SIZES_KEPT:
                self._sizes[nbytes] = False
            return
        if not self._sizes[nbytes]:
            ARENA.add_sizes([nbytes])
            self._sizes[nbytes] = True
        ARENA.serve_thread()
        adopts &= torch._C._current_graph_task_id() != -1 and address not in self._in_flight
        if adopts and nbytes == tensor.numel() * tensor.element_size() and storage.resizable():
            with ARENA.serving():
                storage.resize_(nbytes)

    def close(self) -> None:
        """Make no more buffers in the arena for this group."""
        ARENA.remove_sizes(nbytes for nbytes, is_served in self._sizes.items() if is_served)
        self._sizes.clear()


class GroupMemory:
    """The memory for buffers of collectives that a group offers, as FSDP asks a backend of torch.distributed for it."""

    supports_splitting = supports_coalescing = False

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return device.type == "cpu" and not ARENA.serve_torch()

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for ``size`` elements out of the arena, or ordinary memory if it is small."""
        sizes = ARENA.add_sizes([size * dtype.itemsize])
        with ARENA.serving():
            tensor = torch.empty(size, dtype=dtype, device=device)
        ARENA.remove_sizes(sizes)
        return tensor
