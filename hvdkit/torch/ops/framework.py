"""What operations ask of PyTorch's tensors, in host memory and on devices whose collectives the transport has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hvdkit.api.framework import Framework
from hvdkit.api.operations import Operations
from hvdkit.engine.ops.device_operations import DeviceArray
from hvdkit.torch.ops.arrays import Array, as_array, as_tensor, copy_back, host_copy, host_like, host_view
from hvdkit.torch.ops.tensor_checks import dtype_name


class Torch(Framework[Tensor]):
    """Through host memory. Buffers are tensors there."""

    def on_device(self, engine: Any, tensors: Sequence[Tensor]) -> Framework[Tensor] | None:
        return _ON_DEVICE if tensors[0].device.type in engine.transport.device_types else None

    def device(self, tensor: Tensor) -> str:
        return tensor.device.type

    def dtype(self, tensor: Tensor) -> str:
        return dtype_name(tensor)

    def views(self, tensors: Sequence[Tensor]) -> list[Any]:
        return list(map(host_view, tensors))

    def copies(self, tensors: Sequence[Tensor]) -> list[Any]:
        return list(map(host_copy, tensors))

    def likes(self, tensors: Sequence[Any]) -> list[Any]:
        return list(map(host_like, tensors))

    def arrays(self, buffers: list[Any]) -> list[Any]:
        return list(map(as_array, buffers))

    def place(self, tensor: Tensor) -> torch.device:
        return tensor.device

    def results(self, places: Sequence[torch.device], made: Sequence[Any]) -> list[Tensor]:
        return [_tensor(one).to(place) for place, one in zip(places, made, strict=True)]

    def integers(self, numbers: Sequence[int], splits: Any, place: torch.device) -> Tensor:
        """Of the type and on the device of ``splits`` if that is a tensor, else 32 bits wide and on the CPU."""
        if isinstance(splits, Tensor):
            return torch.tensor(numbers, dtype=splits.dtype, device=splits.device)
        return torch.tensor(numbers, dtype=torch.int32)

    def check_writable(self, function: str, tensors: Sequence[Tensor]) -> None:
        """Raises ValueError for a tensor that cannot be written in place because elements share memory."""
        for tensor in tensors:
            if any(stride == 0 and length > 1 for length, stride in zip(tensor.shape, tensor.stride(), strict=True)):
                raise ValueError(
                    f"{function}: tensor must have memory of its own for each element, got an expanded tensor of shape "
                    f"{tuple(tensor.shape)} and strides {tensor.stride()}\nHINT: use tensor.clone()."
                )

    def write(self, tensors: Sequence[Tensor], made: Sequence[Any]) -> None:
        for tensor, one in zip(tensors, made, strict=True):
            copy_back(tensor, _tensor(one))


class TorchOnDevice(Torch):
    """Buffers are tensors of the device."""

    is_device = True

    def views(self, tensors: Sequence[Tensor]) -> list[Any]:
        return [tensor.detach().resolve_neg().contiguous() for tensor in tensors]

    def copies(self, tensors: Sequence[Tensor]) -> list[Any]:
        contiguous = torch.contiguous_format
        return [tensor.detach().resolve_neg().clone(memory_format=contiguous) for tensor in tensors]

    def arrays(self, buffers: list[Any]) -> list[Any]:
        return list(map(device_array, buffers))


_ON_DEVICE = TorchOnDevice()
OPERATIONS = Operations(Torch())


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

    return DeviceArray(tensor, tuple(tensor.shape), dtype_name(tensor), str(tensor.device), mark, to_host)


def _tensor(made: Any) -> Tensor:
    """A buffer itself; of an array that the engine returned, also of a DeviceArray that was staged, its memory."""
    return made if isinstance(made, Tensor) else as_tensor(made)
