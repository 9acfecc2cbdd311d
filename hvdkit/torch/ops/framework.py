"""PyTorch's tensors for operations by name: checks, host and device memory, and calls of autograd functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from hvdkit.api import checks
from hvdkit.api.framework import RESULTS, Framework
from hvdkit.api.operations import Operations
from hvdkit.engine.ops.batch import DeviceArray
from hvdkit.kernels.dtypes import BFLOAT16, Array
from hvdkit.transports.gpu.streams import as_tensor as as_tensor
from hvdkit.transports.gpu.streams import cuda_mark

_REDUCIBLE = "uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex64 complex128"
REDUCIBLE_DTYPES = tuple(getattr(torch, name) for name in _REDUCIBLE.split())
MOVABLE_DTYPES = (*REDUCIBLE_DTYPES, torch.bool)

# Results of this size and more lie in RESULTS, whose buffers are used again.
HUGE_BYTES = 1 << 20


def dtype_name(dtype: torch.dtype) -> str:
    """Return numpy's name of a dtype."""
    return str(dtype).removeprefix("torch.")


def check_tensors(function: str, tensors: Any, dtypes: Sequence[torch.dtype], single: bool = False) -> list[Tensor]:
    """Return tensors, or the ``single`` one, as a list. Raises errors as check_tensor, or unless on one device."""
    if single:
        check_tensor(function, tensors, dtypes, "tensor")
        return [tensors]
    checks.check_listed(function, tensors, (Tensor,))
    checked = list(tensors)
    if not checked:
        raise ValueError(f"{function}: tensors must hold at least one tensor, got an empty list")
    for index, tensor in enumerate(checked):
        check_tensor(function, tensor, dtypes, f"tensors[{index}]")
        if tensor.device != (device := checked[0].device):
            raise ValueError(f"{function}: tensors must be on the same device, got {device} and {tensor.device}")
    return checked


def check_tensor(function: str, tensor: Any, dtypes: Sequence[torch.dtype], argument: str) -> None:
    """Raise TypeError or ValueError unless ``tensor`` is a dense tensor with data, of one of ``dtypes``."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{function}: {argument} must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.layout != torch.strided:
        raise ValueError(
            f"{function}: {argument} must be dense, got layout {tensor.layout}\n"
            "HINT: use sparse_allreduce_async() for sparse COO tensors, or tensor.to_dense()."
        )
    if tensor.dtype not in dtypes:
        error = checks.wrong_dtype(function, argument, map(dtype_name, dtypes), dtype_name(tensor.dtype))
        raise ValueError(f"{error}\nHINT: use tensor.to(torch.complex64).") if tensor.is_complex() else error
    if tensor.is_meta:
        raise ValueError(f"{function}: {argument} must hold data, got a tensor on the meta device")


def as_array(tensor: Tensor) -> Array:
    """Return an array of the same shape that shares the memory of a contiguous CPU tensor."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(BFLOAT16)
    return tensor.numpy()


def host_copy(tensor: Tensor) -> Tensor:
    """Return a contiguous copy in host memory that nothing else refers to."""
    return host_like(tensor).copy_(tensor.detach())


def resolved(tensor: Tensor) -> Tensor:
    """Return a tensor whose memory holds its values: not their negative or conjugate, as that of a lazy view."""
    return tensor.resolve_conj().resolve_neg()


def host_view(tensor: Tensor) -> Tensor:
    """Return contiguous host memory with the tensor's values: its own memory if that is contiguous, else a copy."""
    tensor = tensor.detach()
    if tensor.is_cpu and tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj():
        return tensor
    return resolved(tensor).cpu().contiguous()


def host_like(tensor: Tensor) -> Tensor:
    """Return contiguous host memory of the tensor's shape and dtype, without its values."""
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes < HUGE_BYTES:
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    return torch.from_numpy(RESULTS.take(nbytes)).view(tensor.dtype).view(tensor.shape)


class TorchFramework(Framework[Tensor]):
    """PyTorch's tensors by way of host memory. Buffers are tensors there."""

    def on_device(self, engine: Any, tensors: Sequence[Tensor]) -> Framework[Tensor] | None:
        return _ON_DEVICE if tensors[0].device.type in engine.transport.device_types else None

    def device(self, tensor: Tensor) -> str:
        return tensor.device.type

    def dtype(self, tensor: Tensor) -> str:
        return dtype_name(tensor.dtype)

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
        return [_tensor(buffer).to(device) for device, buffer in zip(devices, made, strict=True)]

    def integers(self, numbers: Sequence[int], splits: Any, device: torch.device) -> Tensor:
        """Return a vector of the type and on the device of ``splits`` if that is a tensor, else int32 on the CPU."""
        if isinstance(splits, Tensor):
            return torch.tensor(numbers, dtype=splits.dtype, device=splits.device)
        return torch.tensor(numbers, dtype=torch.int32)

    def check_writable(self, function: str, tensors: Sequence[Tensor]) -> None:
        """Raise ValueError for a tensor that cannot be written in place because elements share memory."""
        for tensor in tensors:
            if any(stride == 0 and length > 1 for length, stride in zip(tensor.shape, tensor.stride(), strict=True)):
                raise ValueError(
                    f"{function}: tensor must have memory of its own for each element, got an expanded tensor of shape "
                    f"{tuple(tensor.shape)} and strides {tensor.stride()}\nHINT: use tensor.clone()."
                )

    def write(self, tensors: Sequence[Tensor], made: Sequence[Any]) -> None:
        for tensor, buffer in zip(tensors, map(_tensor, made), strict=True):
            if buffer.data_ptr() == tensor.data_ptr() and buffer.device == tensor.device:
                torch.autograd.graph.increment_version(tensor)  # a backward pass that saved its old value will say so
            else:
                tensor.detach().copy_(buffer)


class TorchDeviceFramework(TorchFramework):
    """PyTorch's tensors on a device whose collectives the transport has. Buffers are tensors of the device."""

    is_device = True

    def views(self, tensors: Sequence[Tensor]) -> list[Any]:
        return [resolved(tensor.detach()).contiguous() for tensor in tensors]

    def copies(self, tensors: Sequence[Tensor]) -> list[Any]:
        return [resolved(tensor.detach()).clone(memory_format=torch.contiguous_format) for tensor in tensors]

    def arrays(self, buffers: list[Any]) -> list[Any]:
        return list(map(device_array, buffers))


_ON_DEVICE = TorchDeviceFramework()
OPERATIONS = Operations(TorchFramework())


def device_array(tensor: Tensor) -> DeviceArray:
    """Return a contiguous tensor for the engine, with its values after this thread's present work on the device."""
    mark: Any = cuda_mark(tensor.device) if tensor.is_cuda else None

    def to_host() -> Array:
        if mark is not None:
            mark.synchronize()
        return as_array(host_copy(tensor))

    return DeviceArray(tensor, tuple(tensor.shape), dtype_name(tensor.dtype), str(tensor.device), mark, to_host)


def _tensor(made: Any) -> Tensor:
    """Return a buffer itself, or a tensor on the memory of an array that the engine returned."""
    return made if isinstance(made, Tensor) else as_tensor(made)


class _NoGradient:
    """A context for autograd functions that keeps nothing, because nothing will be differentiated."""

    def save_for_backward(self, *tensors: Any) -> None: ...

    def mark_non_differentiable(self, *tensors: Any) -> None: ...


def is_tracked(arguments: Sequence[Any]) -> bool:
    """True if autograd needs, or may need, a gradient: forward-mode differentiation does not show on tensors."""
    for argument in arguments:
        if getattr(argument, "requires_grad", False) and torch.is_grad_enabled():
            return True
    return forward_ad._current_level >= 0


def apply(function: Any, *arguments: Any) -> Any:
    """Return ``function.apply(*arguments)`` of a ``torch.autograd.Function``; faster if no gradient is needed."""
    return function.apply(*arguments) if is_tracked(arguments) else function.forward(_NoGradient(), *arguments)
