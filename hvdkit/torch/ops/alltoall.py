"""Alltoall: every rank sends some of its rows to each rank and gets the rows that each has for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hvdkit.api.handles import HANDLES
from hvdkit.api.operations import Asked
from hvdkit.engine.session.process_sets import ProcessSet, global_process_set
from hvdkit.torch.ops import tensor_checks
from hvdkit.torch.ops.framework import OPERATIONS, apply


def _start(asked: Asked, tensor: Tensor, splits: Any) -> int:
    tensor_checks.check_tensor(asked.function, tensor, tensor_checks.MOVABLE_DTYPES)
    return OPERATIONS.alltoall(asked, tensor, lambda: tensor_checks.check_integers(asked.function, "splits", splits))


def alltoall_async(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start an alltoall. Arguments and errors are those of alltoall().

    Do not change the tensor until the handle is synchronised.

    Returns:
        A handle for poll() and synchronize(), whose result is a pair, the new tensor and the rows received from each
        rank.

    Examples:
        >>> rows, received = hvd.synchronize(hvd.alltoall_async(torch.arange(4)))
        >>> received
        tensor([2, 2], dtype=torch.int32)
    """
    return _start(Asked("alltoall_async", name, process_set), tensor, splits)


class AlltoallFunction(torch.autograd.Function):
    """Alltoall whose gradient is the alltoall that brings each row's gradient back to where the row came from."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, splits: Any, asked: Asked) -> Any:
        """The rows received, and how many came from each rank."""
        output, received = HANDLES.synchronize(_start(asked, tensor, splits))
        ctx.rows = tensor.shape[0]
        ctx.received = received.tolist()
        ctx.asked = asked
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor, *_: Any) -> Any:
        """The gradient, with zeros for rows that were not sent, and None for each of the other arguments."""
        name, process_set = ctx.asked.of_gradient().name, ctx.asked.process_set
        gradient, _ = alltoall(grad_output, splits=ctx.received, name=name, process_set=process_set)
        if gradient.shape[0] < ctx.rows:
            rest = gradient.new_zeros(ctx.rows - gradient.shape[0], *gradient.shape[1:])
            gradient = torch.cat([gradient, rest])
        return gradient, None, None


def alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send the first ``splits[0]`` rows of ``tensor`` to the first rank of ``process_set``, the next to the second, ...

    Differentiable: gradients go back to where the rows came from.

    Args:
        tensor: has at least one dimension; its dtype (one of allreduce()'s, or bool) and all of its shape but the first
            dimension are the same on all ranks. It is not changed.
        splits: one integer for each rank, in sum at most the rows of ``tensor``; without it each rank gets an equal
            share.
        name: tells concurrent operations apart; without one, ranks must make their calls in the same order.
        process_set: the ranks that take part.

    Returns:
        A new tensor with the rows received, in rank order, and if ``splits`` was given also a tensor that says how many
        came from each rank.

    Raises:
        TypeError, ValueError: for arguments that make no sense.
        HorovodInternalError: on every rank where ranks disagree.

    Examples:
        >>> hvd.alltoall(torch.tensor([10, 11]) + 10 * hvd.rank())  # on rank 1: tensor([11, 21])
        tensor([10, 20])
        >>> rows, received = hvd.alltoall(torch.arange(3), splits=[1, 2])  # one row to rank 0, two to rank 1
        >>> received.tolist()  # on rank 1: [2, 2]
        [1, 1]
    """
    output, received = apply(AlltoallFunction, tensor, splits, Asked("alltoall", name, process_set, waits=True))
    return output if splits is None else (output, received)
