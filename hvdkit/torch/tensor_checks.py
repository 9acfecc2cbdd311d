"""What the caller may have got wrong with tensors: each check names the function and the argument."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

REDUCIBLE_DTYPES = (
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
)
MOVABLE_DTYPES = (*REDUCIBLE_DTYPES, torch.bool)


def _names(dtypes: Iterable[torch.dtype]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def check_tensor(function: str, tensor: Any, dtypes: Sequence[torch.dtype], argument: str = "tensor") -> None:
    """Raises TypeError unless ``tensor`` is a tensor, ValueError unless it is dense and of one of ``dtypes``."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{function}: {argument} must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.layout != torch.strided:
        raise ValueError(
            f"{function}: {argument} must be dense, got layout {tensor.layout}\n"
            "HINT: use sparse_allreduce_async() for sparse COO tensors, or tensor.to_dense()."
        )
    if tensor.dtype not in dtypes:
        raise ValueError(
            f"{function}: {argument} must be of one of the types {_names(dtypes)}, got {_names([tensor.dtype])}"
        )
    if tensor.is_meta:
        raise ValueError(f"{function}: {argument} must hold data, got a tensor on the meta device")


def check_tensors(function: str, tensors: Any, dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """The tensors of a grouped operation as a list. Raises TypeError or ValueError; all must be on one device."""
    if isinstance(tensors, Tensor) or not isinstance(tensors, Iterable):
        raise TypeError(f"{function}: tensors must be a list of tensors, got {type(tensors).__name__}")
    checked = list(tensors)
    if not checked:
        raise ValueError(f"{function}: tensors must hold at least one tensor, got an empty list")
    for index, tensor in enumerate(checked):
        check_tensor(function, tensor, dtypes, f"tensors[{index}]")
        if tensor.device != checked[0].device:
            raise ValueError(
                f"{function}: tensors must be on the same device, got {checked[0].device} and {tensor.device}"
            )
    return checked


def check_has_rows(function: str, tensors: Sequence[Tensor]) -> None:
    """Raises ValueError for a 0-d tensor: the operation works along the first dimension."""
    if any(tensor.dim() == 0 for tensor in tensors):
        raise ValueError(
            f"{function}: tensor must have at least one dimension, got a scalar (0-d) tensor\n"
            "HINT: use tensor.reshape(1)."
        )


def check_writable(function: str, tensors: Sequence[Tensor]) -> None:
    """Raises ValueError for a tensor that cannot be written in place because elements share memory."""
    for tensor in tensors:
        if any(stride == 0 and length > 1 for length, stride in zip(tensor.shape, tensor.stride(), strict=True)):
            raise ValueError(
                f"{function}: tensor must have memory of its own for each element, got an expanded tensor of shape "
                f"{tuple(tensor.shape)} and strides {tensor.stride()}\nHINT: use tensor.clone()."
            )


def check_integers(function: str, argument: str, numbers: Any) -> None:
    """Raises ValueError for a tensor that holds no integers."""
    if isinstance(numbers, Tensor) and (
        numbers.is_floating_point() or numbers.is_complex() or numbers.dtype == torch.bool
    ):
        raise ValueError(f"{function}: {argument} must hold integers, got a tensor of type {_names([numbers.dtype])}")
