"""Tensors as the engine sees them: contiguous numpy arrays in host memory, shared with the tensor where possible."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hvdkit.api.result_memory import RESULTS

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


def as_tensor(array: Array) -> Tensor:
    """The memory of an array as a CPU tensor of the same shape."""
    if array.dtype == _BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def host_copy(tensor: Tensor) -> Tensor:
    """A contiguous copy in host memory that nobody else holds."""
    return host_like(tensor).copy_(tensor.detach())


def host_view(tensor: Tensor) -> Tensor:
    """Contiguous host memory with the tensor's values: its own memory where that is contiguous, else a copy."""
    tensor = tensor.detach()
    if tensor.is_cpu and tensor.is_contiguous() and not tensor.is_neg():
        return tensor
    return tensor.resolve_neg().cpu().contiguous()


def host_like(tensor: Tensor) -> Tensor:
    """Contiguous host memory of the tensor's shape and type, without its values."""
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes < HUGE_BYTES:
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    return torch.from_numpy(RESULTS.take(nbytes)).view(tensor.dtype).view(tensor.shape)


def copy_back(tensor: Tensor, host: Tensor) -> None:
    """Bring what the engine left in ``host`` into ``tensor``, unless both are the same memory already.

    Either way autograd learns that the tensor changed: a backward pass that saved its old value will say so.
    """
    if host.data_ptr() == tensor.data_ptr() and host.device == tensor.device:
        torch.autograd.graph.increment_version(tensor)
    else:
        tensor.detach().copy_(host)
