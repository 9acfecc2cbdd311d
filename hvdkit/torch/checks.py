"""What the caller may have got wrong: each check names the function, the argument, what was expected and what came."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from hvdkit.engine.process_sets import ProcessSet, global_process_set
from hvdkit.kernels.reduce_op import ReduceOp

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


def check_registered(function: str, process_set: Any) -> int:
    """The set's id. Raises TypeError unless it is a ProcessSet, ValueError unless it is registered."""
    if not isinstance(process_set, ProcessSet):
        raise TypeError(f"{function}: process_set must be a hvd.ProcessSet, got {type(process_set).__name__}")
    if process_set.process_set_id is None:
        raise ValueError(
            f"{function}: process_set must be registered, got {process_set}\n"
            "HINT: pass it to hvd.init(process_sets=[...]) or to hvd.add_process_set()."
        )
    return process_set.process_set_id


def check_process_set(function: str, process_set: Any) -> int:
    """The set's id. Raises TypeError or ValueError unless it is registered and this rank is one of its members."""
    process_set_id = check_registered(function, process_set)
    if process_set is not global_process_set and not process_set.included():
        raise ValueError(
            f"{function}: this rank is not a member of process_set {process_set.process_set_id}, which has the ranks "
            f"{process_set.ranks}\nHINT: call {function}() only where process_set.included() is true."
        )
    return process_set_id


def size_of(process_set: ProcessSet) -> int:
    """How many ranks a set has that check_process_set() has passed."""
    size = process_set.size()
    assert size is not None
    return size


def check_name(function: str, name: Any) -> None:
    """Raises TypeError unless ``name`` is a string or None."""
    if name is not None and not isinstance(name, str):
        raise TypeError(f"{function}: name must be a string or None, got {type(name).__name__}")


def check_passes(function: str, passes: Any) -> int:
    """How many backward passes make a step. Raises TypeError unless it is an integer, ValueError unless positive."""
    if isinstance(passes, bool) or not hasattr(passes, "__index__"):
        raise TypeError(f"{function}: backward_passes_per_step must be an integer, got {passes!r}")
    if passes <= 0:
        raise ValueError(f"backward_passes_per_step must be > 0\n{function}: got {passes!r}")
    return int(passes.__index__())


def check_handle(function: str, handle: Any) -> int:
    """The number that an asynchronous operation returned. Raises TypeError unless it is an integer."""
    if not isinstance(handle, int):
        raise TypeError(
            f"{function}: handle must be an integer that an asynchronous operation returned, got {handle!r}"
        )
    return handle


def check_factor(function: str, argument: str, factor: Any) -> float:
    """A scale factor as a float. Raises TypeError unless it is a number."""
    try:
        return float(factor)
    except (TypeError, ValueError):
        raise TypeError(f"{function}: {argument} must be a number, got {factor!r}") from None


def check_op(function: str, op: Any, allowed: Sequence[ReduceOp] = tuple(ReduceOp)) -> ReduceOp:
    """The reduction as a ReduceOp. Raises ValueError that lists what works."""
    if isinstance(op, int) and not isinstance(op, bool) and op in list(allowed):
        return ReduceOp(op)
    known = isinstance(op, int) and not isinstance(op, bool) and op in list(ReduceOp)
    got = f"hvd.{ReduceOp(op).name.capitalize()}" if known else repr(op)
    expected = ", ".join(f"hvd.{choice.name.capitalize()}" for choice in allowed)
    raise ValueError(f"{function}: op must be one of {expected}, got {got}")


def op_or_average(function: str, op: Any, average: Any) -> ReduceOp:
    """The reduction that ``op`` and Horovod's deprecated ``average`` ask for; without either it is the average.

    Raises ValueError where both are given.
    """
    if average is None:
        return ReduceOp.AVERAGE if op is None else check_op(function, op)
    if op is not None:
        raise ValueError(
            f"{function}: the op parameter supersedes average. Please provide only one of them, "
            f"got op={op!r} and average={average!r}"
        )
    warnings.warn(
        "Parameter `average` has been replaced with `op`: use op=hvd.Average or op=hvd.Sum",
        DeprecationWarning,
        stacklevel=3,  # where the user called the operation
    )
    return ReduceOp.AVERAGE if average else ReduceOp.SUM


def check_adasum(function: str, tensors: Sequence[Tensor], process_set: ProcessSet, size: int) -> None:
    """Raises NotImplementedError where Adasum has no answer, ValueError for tensors that are not floating point."""
    if process_set is not global_process_set:
        raise NotImplementedError(f"{function}: Adasum does not support non-global process sets yet.")
    if size & (size - 1):
        raise NotImplementedError(
            f"{function}: Running Adasum with non-power of 2 ranks is not supported yet, got {size} ranks."
        )
    for tensor in tensors:
        if not tensor.is_floating_point():
            raise ValueError(f"{function}: Adasum needs floating point tensors, got {_names([tensor.dtype])}")


def check_root(function: str, root_rank: Any, process_set: ProcessSet, size: int) -> int:
    """The root's global rank. Raises TypeError unless it is an integer, ValueError unless it is in the process set."""
    try:
        root = root_rank.__index__()
    except AttributeError:
        raise TypeError(f"{function}: root_rank must be an integer, got {root_rank!r}") from None
    ranks = range(size) if process_set is global_process_set else process_set.ranks
    if root not in (ranks or ()):
        raise ValueError(
            f"{function}: root_rank must be one of the process set's ranks {list(ranks or ())}, "
            f"got invalid root rank {root}"
        )
    return int(root)


def check_splits(function: str, splits: Any, rows: int, size: int) -> list[int] | None:
    """How many rows go to each rank, or None for equal shares. Raises TypeError or ValueError."""
    if splits is None:
        if rows % size:
            raise ValueError(
                f"{function}: splits not provided, but first dimension of tensor ({rows}) is not an even multiple of "
                f"the number of workers ({size})"
            )
        return None
    if isinstance(splits, Tensor) and (splits.is_floating_point() or splits.is_complex() or splits.dtype == torch.bool):
        raise ValueError(f"{function}: splits must hold integers, got a tensor of type {_names([splits.dtype])}")
    values = splits.tolist() if hasattr(splits, "tolist") else splits
    try:
        shares = [int(value.__index__()) for value in values]
    except (TypeError, AttributeError):
        raise TypeError(f"{function}: splits must be a list or 1-d tensor of integers, got {splits!r}") from None
    if len(shares) != size:
        raise ValueError(
            f"{function}: splits must have one entry for each worker, that is {size}, got {len(shares)}: {shares}"
        )
    if any(share < 0 for share in shares):
        raise ValueError(f"{function}: splits must not be negative, got {shares}")
    if sum(shares) > rows:
        raise ValueError(
            f"{function}: sum of splits entries is greater than the first dimension of tensor: "
            f"expected at most {rows}, got {sum(shares)} from {shares}"
        )
    return shares
