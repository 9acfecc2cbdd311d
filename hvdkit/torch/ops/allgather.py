"""Allgather: every rank gets all ranks' tensors, one after the other along the first dimension."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hvdkit.api.handles import HANDLES
from hvdkit.api.operations import Asked
from hvdkit.engine.session.process_sets import ProcessSet, global_process_set
from hvdkit.torch.ops import tensor_checks
from hvdkit.torch.ops.allreduce import grouped_allreduce
from hvdkit.torch.ops.framework import OPERATIONS, apply


def allgather_async(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Start an allgather; the result is a new tensor. Arguments and errors are those of allgather().

    Do not change the tensor until the handle is synchronised.

    Returns:
        A handle for poll() and synchronize().

    Examples:
        >>> hvd.synchronize(hvd.allgather_async(torch.tensor([hvd.rank()])))
        tensor([0, 1])
    """
    tensor_checks.check_tensor("allgather_async", tensor, tensor_checks.MOVABLE_DTYPES)
    return OPERATIONS.allgather(Asked("allgather_async", name, process_set, single=True), [tensor])


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start an allgather of several tensors as one. Arguments and errors are those of grouped_allgather().

    Returns:
        A handle for poll() and synchronize(), whose result is a tuple of new tensors.

    Examples:
        >>> hvd.synchronize(hvd.grouped_allgather_async([torch.tensor([hvd.rank()]), torch.ones(1)]))
        (tensor([0, 1]), tensor([1., 1.]))
    """
    group = tensor_checks.check_tensors("grouped_allgather_async", tensors, tensor_checks.MOVABLE_DTYPES)
    return OPERATIONS.allgather(Asked("grouped_allgather_async", name, process_set), group)


class AllgatherFunction(torch.autograd.Function):
    """Allgather whose gradient is this rank's part of the gradients' average over all ranks, as Horovod's."""

    @staticmethod
    def forward(ctx: Any, asked: Asked, *tensors: Tensor) -> Any:
        """As many tensors out as in."""
        outputs = HANDLES.synchronize(OPERATIONS.allgather(asked, tensors))
        ctx.rows = [tensor.shape[0] for tensor in tensors]
        ctx.asked = asked
        return outputs

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        """None for the argument before the tensors, then their gradients."""
        name, process_set = ctx.asked.of_gradient().name, ctx.asked.process_set
        averages = grouped_allreduce(grad_outputs, name=name, process_set=process_set)
        all_rows = allgather(torch.tensor([ctx.rows]), None if name is None else f"{name}.rows", process_set)
        starts = all_rows[: process_set.rank()].sum(dim=0).tolist()
        parts = [
            average.narrow(0, start, rows) for average, start, rows in zip(averages, starts, ctx.rows, strict=True)
        ]
        return None, *parts


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """Concatenate the tensors of all ranks of ``process_set``, in rank order, along the first dimension.

    Differentiable: the gradient is this rank's rows of the average of all ranks' gradients.

    Args:
        tensor: has at least one dimension; its dtype (one of allreduce()'s, or bool) and all of its shape but the first
            dimension are the same on all ranks. It is not changed.
        name: tells concurrent operations apart; without one, ranks must make their calls in the same order.
        process_set: the ranks that take part.

    Returns:
        A new tensor with the sum of all ranks' rows.

    Raises:
        TypeError, ValueError: for arguments that make no sense.
        HorovodInternalError: on every rank where ranks disagree.

    Examples:
        >>> hvd.allgather(torch.full((1 + hvd.rank(), 2), hvd.rank()))  # a row of rank 0, two of rank 1
        tensor([[0, 0],
                [1, 1],
                [1, 1]])
    """
    tensor_checks.check_tensor("allgather", tensor, tensor_checks.MOVABLE_DTYPES)
    output: Tensor = apply(AllgatherFunction, Asked("allgather", name, process_set, waits=True), tensor)[0]
    return output


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """Allgather several tensors as one operation. Arguments, gradients and errors are those of allgather().

    Args:
        tensors: a list of tensors, all on one device, each as in allgather().

    Returns:
        A list of new tensors.

    Examples:
        >>> hvd.grouped_allgather([torch.tensor([hvd.rank()]), torch.ones(1)])
        [tensor([0, 1]), tensor([1., 1.])]
    """
    group = tensor_checks.check_tensors("grouped_allgather", tensors, tensor_checks.MOVABLE_DTYPES)
    return list(apply(AllgatherFunction, Asked("grouped_allgather", name, process_set, waits=True), *group))
