"""The layout of gradients in memory: the slots that they fit, and the memory that they share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import torch
from torch.nn.parameter import is_lazy

from hvdkit.arena import SMALLEST_BYTES
from hvdkit.engine.steps.plan import Slot
from hvdkit.torch.gradients.names import parameters_of
from hvdkit.torch.ops.framework import as_array

_NUMPY_DTYPES: dict[torch.dtype, np.dtype[Any]] = {
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
    torch.float16: np.dtype(np.float16),
    torch.bfloat16: np.dtype(ml_dtypes.bfloat16),
}
TOO_WIDE = (
    "The gradient of '{name}' is {dtype} in this step, but all ranks have agreed to reduce it as {agreed}, which would "
    "round it.\n"
    "HINT: the parameter's grad_dtype is None, which leaves the dtype open: set grad_dtype to {dtype} on all ranks."
)


class Kinds(NamedTuple):
    """The dtypes of gradients and the sparse axes of sparse gradients, by the parameter's id; the same on all ranks."""

    dtypes: dict[int, torch.dtype]
    sparse_dims: dict[int, int]


def gradient_dtype(parameter: torch.Tensor) -> torch.dtype:
    """Return the dtype of a parameter's gradients as far as PyTorch fixes it (``grad_dtype``), else its own."""
    return getattr(parameter, "grad_dtype", None) or parameter.dtype


# Returns all that decides gradient_dtype; faster than to call that for each parameter in each step.
declared_dtypes = attrgetter("dtype", "grad_dtype" if hasattr(torch.Tensor, "grad_dtype") else "dtype")


def arena_sizes(parameters: Iterable[torch.Tensor]) -> list[int]:
    """Return the sizes, in bytes, of the gradients of these parameters that the arena is to serve."""
    return [
        nbytes
        for parameter in parameters
        if parameter.is_cpu
        and not is_lazy(parameter)
        and (nbytes := parameter.numel() * gradient_dtype(parameter).itemsize) >= SMALLEST_BYTES
    ]


def encodable_shapes(
    groups: Iterable[dict[str, Any]], name_of: Callable[[torch.Tensor], str]
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the gradients that codecs may encode, as they lie in memory, by the parameters' names."""
    return {
        name_of(parameter): slot_of("", parameter, gradient_dtype(parameter)).shape
        for parameter in parameters_of(groups)
        if not is_lazy(parameter) and can_be_planned(parameter, gradient_dtype(parameter))
    }


def can_be_planned(parameter: torch.Tensor, dtype: torch.dtype) -> bool:
    """True for parameters whose gradients, of ``dtype``, fusion buffers hold: floating point or complex, dense."""
    return _real(dtype) in _NUMPY_DTYPES and parameter.layout is torch.strided


def _real(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the numbers in memory; a complex element is a pair of them."""
    return dtype.to_real() if dtype.is_complex else dtype


def memory_order(parameter: torch.Tensor) -> list[int] | None:
    """Return a parameter's axes from the slowest to the fastest, if it fills its memory in another order than usual.

    None for the usual order, and for a parameter whose elements do not fill one block of memory.
    """
    if parameter.is_contiguous():
        return None
    strides: tuple[int, ...] = parameter.stride()
    order = sorted(range(parameter.dim()), key=lambda axis: (strides[axis], parameter.shape[axis]), reverse=True)
    return order if parameter.permute(order).is_contiguous() else None


def slot_of(name: str, parameter: torch.Tensor, dtype: torch.dtype, codec: int = 0) -> Slot:
    """Return the slot of a parameter's gradients, of ``dtype``; ``codec`` is the number of its codec in the plan.

    Ranks whose memory orders differ (channels_last on some) differ in the slot's name. A complex parameter's slot has
    one axis more, as in DistributedDataParallel: of the real and the imaginary part.
    """
    shape = tuple(parameter.shape)
    if (order := memory_order(parameter)) is not None:
        name, shape = f"{name} (axes in memory: {order})", tuple(parameter.shape[axis] for axis in order)
    if dtype.is_complex:
        name, shape = f"{name} (complex)", (*shape, 2)
    return Slot(name, shape, _NUMPY_DTYPES[_real(dtype)], codec)


def layout_of(parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor without memory, of a parameter's shape and of ``dtype``, whose strides are those of its slot."""
    if parameter.is_contiguous() or memory_order(parameter) is not None:
        return torch.empty_strided(parameter.shape, parameter.stride(), dtype=dtype, device="meta")
    return torch.empty(parameter.shape, dtype=dtype, device="meta")


_use_count = torch._C._storage_Use_Count
_single = torch.empty(1)
# The count of a storage that one tensor holds, with the reference that asking for it adds.
_ONE_HOLDER = _use_count(_single.untyped_storage()._cdata)

# The dtype, shape and strides of a slot, if it is contiguous, if its lane is in the host's memory, and its device.
Form = tuple[torch.dtype, torch.Size, tuple[int, ...], bool, bool, torch.device]


def form_of(like: torch.Tensor, device: torch.device) -> Form:
    """Return the form of a slot with the dtype, shape and strides of ``like``, in a lane on ``device``."""
    return like.dtype, like.shape, like.stride(), like.is_contiguous(), device.type == "cpu", device


def can_be_reduced_in_place(gradient: torch.Tensor, form: Form) -> bool:
    """True if a gradient is one block of memory in the order of its slot, which no other tensor has."""
    dtype, shape, strides, is_contiguous, on_host, device = form
    return bool(
        gradient.dtype is dtype
        and gradient.layout is torch.strided
        and gradient.shape == shape
        and ((is_contiguous and gradient.is_contiguous()) or gradient.stride() == strides)
        and (gradient.is_cpu if on_host else gradient.device == device)
        and not gradient.is_neg()
        and not gradient.is_conj()
        and _use_count(gradient.untyped_storage()._cdata) == _ONE_HOLDER
    )


def flat_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return a flat view of a tensor that fills one block of memory; complex elements become two numbers each."""
    # .data: what the engine writes there must not count as a change of the tensor.
    flat = tensor.data.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat


def flat_array(tensor: torch.Tensor) -> Any:
    """Return ``flat_view`` as an array."""
    return as_array(flat_view(tensor))


def _extent(tensor: torch.Tensor) -> int:
    """Return the bytes from a strided tensor's first element to the end of its last element."""
    if tensor.numel() == 0:
        return 0
    steps = ((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (sum(steps) + 1) * tensor.element_size()


def overlapping(tensors: Sequence[torch.Tensor]) -> set[int]:
    """Return the indices of dense tensors that may share memory with an earlier one, or whose own elements may."""
    shared, reached = set(), 0
    for begin, index in sorted((tensor.data_ptr(), i) for i, tensor in enumerate(tensors)):
        tensor = tensors[index]
        if begin < reached or torch._debug_has_internal_overlap(tensor) == 1:
            shared.add(index)
        reached = max(reached, begin + (tensor.nbytes if tensor.is_contiguous() else _extent(tensor)))
    return shared


def storage_of(gradient: torch.Tensor | None) -> int | None:
    """Return the address of a dense gradient's storage, None for other gradients."""
    if gradient is None or gradient.layout is not torch.strided:
        return None
    return gradient.untyped_storage().data_ptr()
