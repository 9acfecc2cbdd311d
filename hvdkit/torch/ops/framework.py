"""What operations ask of PyTorch's tensors, in host memory and on devices whose collectives the transport has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.autograd import forward_ad

from hvdkit.api.framework import Framework
from hvdkit.api.operations import Operations
from hvdkit.api.result_memory import RESULTS
from hvdkit.engine.ops.device_operations import DeviceArray
from hvdkit.torch.ops.tensor_checks import dtype_name
from hvdkit.transports.gpu.host_copies import as_tensor as as_tensor
from hvdkit.transports.gpu.streams import cuda_mark

Array = npt.NDArray[Any]

# From here on memory is used again; see result_memory.
HUGE_BYTES = 1 << 20

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def as_array(tensor: Tensor) -> Array:
    """The memory of a contiguous CPU tensor as an array of the same shape: what one writes the other reads."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(_BFLOAT16)
    return tensor.numpy()


def host_copy(tensor: Tensor) -> Tensor:
    """A contiguous copy in host memory that nobody else holds."""
    return host_like(tensor).copy_(tensor.detach())


def resolved(tensor: Tensor) -> Tensor:
    """Return a tensor whose memory holds its values: not their negative or conjugate, as that of a lazy view."""
    return tensor.resolve_conj().resolve_neg()


def host_view(tensor: Tensor) -> Tensor:
    """Contiguous host memory with the tensor's values: its own memory where that is contiguous, else a copy."""
    tensor = tensor.detach()
    if tensor.is_cpu and tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj():
        return tensor
    return resolved(tensor).cpu().contiguous()


def host_like(tensor: Tensor) -> Tensor:
    """Contiguous host memory of the tensor's shape and type, without its values."""
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes < HUGE_BYTES:
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    return torch.from_numpy(RESULTS.take(nbytes)).view(tensor.dtype).view(tensor.shape)


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

    def device_of(self, tensor: Tensor) -> torch.device:
        return tensor.device

    def results(self, devices: Sequence[torch.device], made: Sequence[Any]) -> list[Tensor]:
        return [_tensor(one).to(device) for device, one in zip(devices, made, strict=True)]

    def integers(self, numbers: Sequence[int], splits: Any, device: torch.device) -> Tensor:
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
            buffer = _tensor(one)
            if buffer.data_ptr() == tensor.data_ptr() and buffer.device == tensor.device:
                torch.autograd.graph.increment_version(tensor)  # a backward pass that saved its old value will say so
            else:
                tensor.detach().copy_(buffer)


class TorchOnDevice(Torch):
    """Buffers are tensors of the device."""

    is_device = True

    def views(self, tensors: Sequence[Tensor]) -> list[Any]:
        return [resolved(tensor.detach()).contiguous() for tensor in tensors]

    def copies(self, tensors: Sequence[Tensor]) -> list[Any]:
        contiguous = torch.contiguous_format
        return [resolved(tensor.detach()).clone(memory_format=contiguous) for tensor in tensors]

    def arrays(self, buffers: list[Any]) -> list[Any]:
        return list(map(device_array, buffers))


_ON_DEVICE = TorchOnDevice()
OPERATIONS = Operations(Torch())


def device_array(tensor: Tensor) -> DeviceArray:
    """A contiguous tensor for the engine, with its values as of the present thread's work on the device."""
    mark: Any = cuda_mark(tensor.device) if tensor.is_cuda else None

    def to_host() -> Array:
        if mark is not None:
            mark.synchronize()
        return as_array(host_copy(tensor))

    return DeviceArray(tensor, tuple(tensor.shape), dtype_name(tensor), str(tensor.device), mark, to_host)


def _tensor(made: Any) -> Tensor:
    """A buffer itself; of an array that the engine returned, also of a DeviceArray that was staged, its memory."""
    return made if isinstance(made, Tensor) else as_tensor(made)


class _NoGradient:
    """Takes the place of a function's context where nothing will be differentiated, and keeps nothing for it."""

    def save_for_backward(self, *tensors: Any) -> None: ...

    def mark_non_differentiable(self, *tensors: Any) -> None: ...


def is_tracked(arguments: Sequence[Any]) -> bool:
    """Whether a gradient is asked for, or may be: forward-mode differentiation does not show on tensors."""
    for argument in arguments:
        if getattr(argument, "requires_grad", False) and torch.is_grad_enabled():
            return True
    return forward_ad._current_level >= 0


def apply(function: Any, *arguments: Any) -> Any:
    """``function.apply(*arguments)`` for a ``torch.autograd.Function``; quicker where no gradient is asked for.

    Inside forward-mode differentiation PyTorch says what is missing.
    """
    if is_tracked(arguments):
        return function.apply(*arguments)
    return function.forward(_NoGradient(), *arguments)
