"""What the caller may have got wrong with tensors: each check names the function and the argument."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hvdkit.api import checks

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
    torch.complex64,
    torch.complex128,
)
MOVABLE_DTYPES = (*REDUCIBLE_DTYPES, torch.bool)


def dtype_name(tensor: Tensor) -> str:
    """The name of its dtype in numpy."""
    return str(tensor.dtype).removeprefix("torch.")


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
        error = checks.wrong_dtype(
            function, argument, [str(dtype).removeprefix("torch.") for dtype in dtypes], dtype_name(tensor)
        )
        raise ValueError(f"{error}\nHINT: use tensor.to(torch.complex64).") if tensor.is_complex() else error
    if tensor.is_meta:
        raise ValueError(f"{function}: {argument} must hold data, got a tensor on the meta device")


def check_tensors(function: str, tensors: Any, dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """The tensors of a grouped operation as a list. Raises TypeError or ValueError; all must be on one device."""
    checks.check_listed(function, tensors, (Tensor,))
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


def check_integers(function: str, argument: str, numbers: Any) -> Any:
    """The ``numbers``. Raises ValueError for a tensor that holds no integers."""
    if isinstance(numbers, Tensor) and (
        numbers.is_floating_point() or numbers.is_complex() or numbers.dtype == torch.bool
    ):
        raise checks.no_integers(function, argument, dtype_name(numbers))
    return numbers
