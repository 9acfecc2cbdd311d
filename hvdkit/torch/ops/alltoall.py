"""Alltoall: every rank sends some of its rows to each rank and gets the rows that each has for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hvdkit.api.checks import no_integers
from hvdkit.api.operations import HANDLES, Invocation
from hvdkit.engine.session.process_sets import ProcessSet, global_process_set
from hvdkit.torch.ops.framework import MOVABLE_DTYPES, OPERATIONS, apply, check_tensors, dtype_name


def _start(invocation: Invocation, tensor: Tensor, splits: Any) -> int:
    check_tensors(invocation.function, tensor, MOVABLE_DTYPES, single=True)

    def checked_splits() -> Any:
        dtype = splits.dtype if isinstance(splits, Tensor) else torch.int64
        if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
            raise no_integers(invocation.function, "splits", dtype_name(dtype))
        return splits

    return OPERATIONS.alltoall(invocation, tensor, checked_splits)


def alltoall_async(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start an alltoall. Arguments and errors are those of alltoall(). Returns a handle of alltoall()'s two results.

    Examples:
        >>> rows, received = hvd.synchronize(hvd.alltoall_async(torch.arange(4)))
        >>> received
        tensor([2, 2], dtype=torch.int32)
    """
    return _start(Invocation("alltoall_async", name, process_set), tensor, splits)


class AlltoallFunction(torch.autograd.Function):
    """Alltoall whose gradient is the alltoall that brings each row's gradient back to the rank that sent the row."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, splits: Any, invocation: Invocation) -> Any:
        """Return the rows received, and the number of rows from each rank."""
        output, received = HANDLES.synchronize(_start(invocation, tensor, splits))
        ctx.invocation, ctx.rows, ctx.received = invocation, tensor.shape[0], received.tolist()
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor, *_: Any) -> Any:
        """Return the gradient, with zeros for rows that were not sent, and None for each of the other arguments."""
        name, process_set = ctx.invocation.of_gradient().name, ctx.invocation.process_set
        gradient, _ = alltoall(grad_output, splits=ctx.received, name=name, process_set=process_set)
        rest = gradient.new_zeros(ctx.rows - gradient.shape[0], *gradient.shape[1:])
        return torch.cat([gradient, rest]) if len(rest) else gradient, None, None


def alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send the first ``splits[0]`` rows of ``tensor`` to the first rank of ``process_set``, the next to the second, ...

    Each row's gradient goes back to the rank that sent the row. The other arguments and errors are those of
    allgather().

    Args:
        splits: one integer for each rank, in sum at most the rows of ``tensor``; equal shares without it.

    Returns:
        A new tensor with the rows received, in rank order, and if ``splits`` was given also a tensor with the number of
        rows from each rank.

    Examples:
        >>> hvd.alltoall(torch.tensor([10, 11]) + 10 * hvd.rank())  # on rank 1: tensor([11, 21])
        tensor([10, 20])
        >>> rows, received = hvd.alltoall(torch.arange(3), splits=[1, 2])  # one row to rank 0, two to rank 1
        >>> received.tolist()  # on rank 1: [2, 2]
        [1, 1]
    """
    output, received = apply(AlltoallFunction, tensor, splits, Invocation("alltoall", name, process_set, waits=True))
    return output if splits is None else (output, received)
