"""Broadcast: every rank gets the root's tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hvdkit.api.operations import HANDLES, Invocation
from hvdkit.engine.session import runtime
from hvdkit.engine.session.process_sets import ProcessSet, global_process_set
from hvdkit.torch.ops.allreduce import allreduce
from hvdkit.torch.ops.framework import MOVABLE_DTYPES, OPERATIONS, apply, check_tensors


def _start(invocation: Invocation, tensor: Tensor, root_rank: int, in_place: bool = False) -> int:
    checked = check_tensors(invocation.function, tensor, MOVABLE_DTYPES, single=True)
    return OPERATIONS.broadcast(invocation, checked, root_rank, in_place)


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start a broadcast to new tensors. Arguments and errors are those of broadcast(). Returns a handle.

    Examples:
        >>> hvd.synchronize(hvd.broadcast_async(torch.full((2,), hvd.rank()), root_rank=1))
        tensor([1, 1])
    """
    return _start(Invocation("broadcast_async", name, process_set, single=True), tensor, root_rank)


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start a broadcast in place. Arguments and errors are those of broadcast(). Returns a handle of the tensor.

    Examples:
        >>> hvd.synchronize(hvd.broadcast_async_(torch.full((2,), hvd.rank()), root_rank=1))
        tensor([1, 1])
    """
    return _start(Invocation("broadcast_async_", name, process_set, single=True), tensor, root_rank, in_place=True)


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Broadcast in place. Arguments and errors are those of broadcast(). Returns the tensor itself.

    Examples:
        >>> hvd.broadcast_(torch.full((2,), hvd.rank()), root_rank=1)
        tensor([1, 1])
    """
    invocation = Invocation("broadcast_", name, process_set, waits=True, single=True)
    output: Tensor = HANDLES.synchronize(_start(invocation, tensor, root_rank, in_place=True))
    return output


class BroadcastFunction(torch.autograd.Function):
    """Broadcast with the gradient, and the arguments, of Horovod's: scripts call it as ``HorovodBroadcast``."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, root_rank: int, name: str | None, process_set: Any) -> Any:
        invocation = Invocation("broadcast", name, process_set, waits=True, single=True)
        ctx.root_rank, ctx.invocation = root_rank, invocation
        return HANDLES.synchronize(_start(invocation, tensor, root_rank))

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        """Return the gradient, and None for each of the other arguments."""
        name, process_set = ctx.invocation.of_gradient().name, ctx.invocation.process_set
        average = allreduce(grad_output, name=name, process_set=process_set)
        if runtime.topology().rank != ctx.root_rank:
            average = torch.zeros_like(average)
        return average, None, None, None


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Give all ranks of ``process_set`` the tensor of ``root_rank``.

    The root's gradient is the average of all ranks' gradients, that of other ranks is zero. The other arguments and
    errors are those of allreduce().

    Args:
        tensor: has the same shape and dtype (one of allreduce()'s, or bool) on all ranks.
        root_rank: counts among all ranks, not in the set.

    Returns:
        A new tensor of the same shape and dtype.

    Examples:
        >>> hvd.broadcast(torch.full((2,), hvd.rank()), root_rank=1)
        tensor([1, 1])
    """
    output: Tensor = apply(BroadcastFunction, tensor, root_rank, name, process_set)
    return output
