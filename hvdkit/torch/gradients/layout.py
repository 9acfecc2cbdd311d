"""How a gradient lies in memory: which slot it fits, and which others it shares memory with."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import torch

from hvdkit.engine.steps.offers import Offer
from hvdkit.engine.steps.plan import Slot
from hvdkit.torch.ops.framework import as_array, as_tensor

_NUMPY_DTYPES: dict[torch.dtype, np.dtype[Any]] = {
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
    torch.float16: np.dtype(np.float16),
    torch.bfloat16: np.dtype(ml_dtypes.bfloat16),
}


def can_be_planned(parameter: torch.Tensor) -> bool:
    """True for the gradients that fusion buffers hold: real floating point, dense."""
    return parameter.dtype in _NUMPY_DTYPES and parameter.layout is torch.strided


def memory_order(parameter: torch.Tensor) -> list[int] | None:
    """The axes from the slowest to the fastest where a parameter fills its memory in another order than its shape's.

    None for the usual order, and for a parameter whose elements do not fill one block of memory.
    """
    if parameter.is_contiguous():
        return None
    strides: tuple[int, ...] = parameter.stride()
    order = sorted(range(parameter.dim()), key=lambda axis: (strides[axis], parameter.shape[axis]), reverse=True)
    return order if parameter.permute(order).is_contiguous() else None


def slot_of(name: str, parameter: torch.Tensor, codec: int = 0) -> Slot:
    """A parameter's slot; ``codec`` is the number of its codec in the plan.

    Ranks whose memory orders differ (channels_last on some) differ in the slot's name.
    """
    shape = tuple(parameter.shape)
    order = memory_order(parameter)
    if order is not None:
        name, shape = f"{name} (axes in memory: {order})", tuple(parameter.shape[axis] for axis in order)
    return Slot(name, shape, _NUMPY_DTYPES[parameter.dtype], codec)


def tensor_on(memory: Any, like: torch.Tensor) -> torch.Tensor:
    """A tensor of the shape and strides of ``like`` whose elements are ``memory``, a flat array of its dtype."""
    return as_tensor(memory).as_strided_(like.shape, like.stride())


def layout_of(parameter: torch.Tensor) -> torch.Tensor:
    """A tensor without memory, of a parameter's shape and dtype, whose strides are those of its slot."""
    if parameter.is_contiguous() or memory_order(parameter) is not None:
        return torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="meta")
    return torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")


def fits(gradient: torch.Tensor, like: torch.Tensor) -> bool:
    """Whether a gradient's elements are one block of memory in the order of its slot, which is that of ``like``."""
    return (
        gradient.layout is torch.strided
        and gradient.dtype is like.dtype
        and gradient.shape == like.shape
        and (gradient.stride() == like.stride() or (gradient.is_contiguous() and like.is_contiguous()))
        and not gradient.is_neg()
    )


def _holders(tensor: torch.Tensor) -> int:
    """How many tensors, and others, hold a tensor's storage, as far as a constant."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


_ONE_HOLDER = _holders(torch.empty(1))


def has_storage_alone(tensor: torch.Tensor) -> bool:
    """Whether nobody else, tensor or not, holds a tensor's storage."""
    return _holders(tensor) == _ONE_HOLDER


def references(tensor: torch.Tensor) -> int:
    """How many names in Python hold a tensor, as far as a constant."""
    return sys.getrefcount(tensor)


def _references_of_a_gradient() -> int:
    parameter = torch.nn.Parameter(torch.empty(1))
    parameter.grad = torch.empty(1)
    gradient = parameter.grad
    return references(gradient)


ALONE = _references_of_a_gradient()


def flat_view(tensor: torch.Tensor) -> torch.Tensor:
    """The one block of memory that a tensor's elements fill."""
    # .data: what the engine writes there must not count as a change of the tensor.
    return tensor.data.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def offer_from(tensor: torch.Tensor, as_tensor: bool) -> Offer:
    """A tensor that fills one block of memory, for the engine, which takes it ``as_tensor`` or as an array."""
    own = tensor.data  # now: set_() may make the tensor itself another size while it is in flight
    if as_tensor:
        return Offer(0, lambda: flat_view(own))
    return Offer(tensor.data_ptr(), lambda: as_array(flat_view(own)))


def extent(tensor: torch.Tensor) -> int:
    """Bytes from a strided tensor's first element to the end of its last one, with what lies between them."""
    if tensor.is_contiguous():
        return tensor.nbytes
    if tensor.numel() == 0:
        return 0
    steps = ((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (sum(steps) + 1) * tensor.element_size()


def overlapping(tensors: Sequence[torch.Tensor], keep: Sequence[bool]) -> list[int]:
    """Which of these dense tensors may have memory in common with one before them; those to ``keep`` come first."""
    begins = [tensor.data_ptr() for tensor in tensors]
    found, reached = [], 0
    for one in sorted(range(len(tensors)), key=lambda one: (begins[one], not keep[one])):
        if begins[one] < reached:
            found.append(one)
        reached = max(reached, begins[one] + extent(tensors[one]))
    return found


def storage_of(gradient: torch.Tensor | None) -> int | None:
    """The address of a dense gradient's storage."""
    if gradient is None or gradient.layout is not torch.strided:
        return None
    return gradient.untyped_storage().data_ptr()
