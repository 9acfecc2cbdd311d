"""Reducescatter: a reduction of all ranks' tensors of which every rank gets its share of the rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hvdkit.api import checks
from hvdkit.api.operations import HANDLES, Invocation
from hvdkit.engine.ops.requests import ReduceRequest
from hvdkit.engine.session.process_sets import ProcessSet, global_process_set
from hvdkit.kernels.reduce_op import ReduceOp
from hvdkit.torch.compression import Compression, reduced
from hvdkit.torch.ops.framework import OPERATIONS, REDUCIBLE_DTYPES, check_tensors
from hvdkit.torch.ops.gather import grouped_allgather


def _checked(
    function: str, tensors: Any, op: Any, prescale: Any, postscale: Any, single: bool = False
) -> tuple[list[Tensor], ReduceRequest]:
    """Return the tensors as a list, and the request; ``single``: ``tensors`` is one tensor."""
    checked = check_tensors(function, tensors, REDUCIBLE_DTYPES, single)
    reduce_op = checks.check_op(function, op, (ReduceOp.AVERAGE, ReduceOp.SUM))
    return checked, ReduceRequest(reduce_op, *checks.check_factors(function, prescale, postscale))


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: int = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start a reducescatter. Arguments and errors are those of reducescatter(). Returns a handle of a new tensor.

    Examples:
        >>> hvd.synchronize(hvd.reducescatter_async(torch.ones(4), op=hvd.Sum))
        tensor([2., 2.])
    """
    group, request = _checked("reducescatter_async", tensor, op, prescale_factor, postscale_factor, single=True)
    return OPERATIONS.reducescatter(Invocation("reducescatter_async", name, process_set, single=True), group, request)


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: int = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start a grouped_reducescatter(). Arguments and errors are those of grouped_reducescatter(). Returns a handle.

    Examples:
        >>> hvd.synchronize(hvd.grouped_reducescatter_async([torch.ones(4), torch.ones(2)], op=hvd.Sum))
        (tensor([2., 2.]), tensor([2.]))
    """
    group, request = _checked("grouped_reducescatter_async", tensors, op, prescale_factor, postscale_factor)
    return OPERATIONS.reducescatter(Invocation("grouped_reducescatter_async", name, process_set), group, request)


class ReducescatterFunction(torch.autograd.Function):
    """Reducescatter whose gradient is the allgather of the gradients, times the ranks for Sum, as Horovod's."""

    @staticmethod
    def forward(ctx: Any, invocation: Invocation, request: ReduceRequest, *tensors: Tensor) -> Any:
        outputs = HANDLES.synchronize(OPERATIONS.reducescatter(invocation, tensors, request))
        times = checks.size_of(invocation.process_set) if request.op == ReduceOp.SUM else 1
        ctx.invocation, ctx.factors = invocation, (times, request.prescale, request.postscale)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        """Return None for each argument before the tensors, then their gradients."""
        scaled = list(grad_outputs)
        for factor in ctx.factors:
            if factor != 1:
                scaled = [gradient * factor for gradient in scaled]
        invocation = ctx.invocation.of_gradient()
        return None, None, *grouped_allgather(scaled, name=invocation.name, process_set=invocation.process_set)


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Reduce a tensor over all ranks of ``process_set`` and keep this rank's share of the rows.

    The gradient is the gathered gradients of all shares, times the number of ranks for Sum. The other arguments and
    errors are those of allreduce().

    Args:
        tensor: has at least one dimension and the same shape and dtype (one of allreduce()'s) on all ranks.
        op: hvd.Average or hvd.Sum.

    Returns:
        A new tensor with rows / ranks rows, one more on each of the first (rows % ranks) ranks.

    Examples:
        >>> hvd.reducescatter(torch.arange(3.0), op=hvd.Sum)  # on rank 1: tensor([4.])
        tensor([0., 2.])
    """
    group, request = _checked("reducescatter", tensor, op, prescale_factor, postscale_factor, single=True)
    invocation = Invocation("reducescatter", name, process_set, waits=True)
    return reduced(ReducescatterFunction, invocation, group, request, compression)[0]


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: Any = Compression.none,
    op: int = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """Reducescatter several tensors as one. Other arguments, gradients and errors are those of reducescatter().

    Args:
        tensors: a list of tensors, all on one device, each as in reducescatter().

    Returns:
        A list of new tensors.

    Examples:
        >>> hvd.grouped_reducescatter([torch.ones(4), torch.ones(2)], op=hvd.Sum)
        [tensor([2., 2.]), tensor([2.])]
    """
    group, request = _checked("grouped_reducescatter", tensors, op, prescale_factor, postscale_factor)
    invocation = Invocation("grouped_reducescatter", name, process_set, waits=True)
    return reduced(ReducescatterFunction, invocation, group, request, compression)
