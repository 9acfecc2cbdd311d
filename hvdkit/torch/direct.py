"""Tensors that go to the engine as they are, on their device, where the transport has collectives for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hvdkit.engine import direct
from hvdkit.engine.direct import DeviceArray
from hvdkit.engine.requests import ReduceRequest
from hvdkit.torch.arrays import Array, as_array, as_tensor, host_copy

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGERS = (torch.uint8, torch.int8, torch.int32, torch.int64)


def moves_directly(engine: Any, tensor: Tensor) -> bool:
    """Whether broadcast and allgather leave this tensor on its device."""
    return tensor.device.type in engine.transport.device_types


def reduces_directly(engine: Any, tensors: Sequence[Tensor], request: ReduceRequest) -> bool:
    """Whether an allreduce leaves these tensors on their device: the same on all ranks whose requests match."""
    if not moves_directly(engine, tensors[0]) or any(tensor.dtype not in _FLOATS + _INTEGERS for tensor in tensors):
        return False
    return direct.reduces_directly(request, all(tensor.dtype in _FLOATS for tensor in tensors))


def device_copy(tensor: Tensor) -> Tensor:
    """A contiguous copy on the same device that nobody else holds."""
    return tensor.detach().resolve_neg().clone(memory_format=torch.contiguous_format)


def device_view(tensor: Tensor) -> Tensor:
    """The tensor's own memory where that is contiguous, else a copy on the same device."""
    return tensor.detach().resolve_neg().contiguous()


def device_array(tensor: Tensor) -> DeviceArray:
    """A contiguous tensor for the engine, with its values as of the present thread's work on the device."""
    mark: Any = None
    if tensor.is_cuda:
        mark = torch.cuda.Event()  # type: ignore[no-untyped-call]
        mark.record(torch.cuda.current_stream(tensor.device))

    def to_host() -> Array:
        if mark is not None:
            mark.synchronize()
        return as_array(host_copy(tensor))

    dtype = str(tensor.dtype).removeprefix("torch.")
    return DeviceArray(tensor, tuple(tensor.shape), dtype, str(tensor.device), mark, to_host)


def result_tensor(result: Any) -> Tensor:
    """What the engine returned for a DeviceArray: a tensor of the device, or an array where it was staged after all."""
    return result if isinstance(result, Tensor) else as_tensor(result)
