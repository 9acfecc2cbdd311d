"""Reducescatter: a reduction of all ranks' tensors of which every rank gets its share of the rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hvdkit.api import checks
from hvdkit.api.handles import HANDLES
from hvdkit.api.operations import Asked
from hvdkit.engine.ops.requests import ReduceRequest
from hvdkit.engine.session.process_sets import ProcessSet, global_process_set
from hvdkit.kernels.reduce_op import ReduceOp
from hvdkit.torch.compression import Compression, reduced
from hvdkit.torch.ops import tensor_checks
from hvdkit.torch.ops.allgather import grouped_allgather
from hvdkit.torch.ops.framework import OPERATIONS

_OPS = (ReduceOp.AVERAGE, ReduceOp.SUM)


def _request(function: str, op: Any, prescale_factor: Any, postscale_factor: Any) -> ReduceRequest:
    reduce_op = checks.check_op(function, op, _OPS)
    return ReduceRequest(reduce_op, *checks.check_factors(function, prescale_factor, postscale_factor))


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: int = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start a reducescatter; the result is a new tensor. Arguments and errors are those of reducescatter().

    Returns:
        A handle for poll() and synchronize().

    Examples:
        >>> hvd.synchronize(hvd.reducescatter_async(torch.ones(4), op=hvd.Sum))
        tensor([2., 2.])
    """
    function = "reducescatter_async"
    tensor_checks.check_tensor(function, tensor, tensor_checks.REDUCIBLE_DTYPES)
    request = _request(function, op, prescale_factor, postscale_factor)
    return OPERATIONS.reducescatter(Asked(function, name, process_set, single=True), [tensor], request)


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: int = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start a reducescatter of several tensors as one.

    Arguments and errors are those of grouped_reducescatter().

    Returns:
        A handle for poll() and synchronize(), whose result is a tuple of new tensors.

    Examples:
        >>> hvd.synchronize(hvd.grouped_reducescatter_async([torch.ones(4), torch.ones(2)], op=hvd.Sum))
        (tensor([2., 2.]), tensor([2.]))
    """
    function = "grouped_reducescatter_async"
    group = tensor_checks.check_tensors(function, tensors, tensor_checks.REDUCIBLE_DTYPES)
    request = _request(function, op, prescale_factor, postscale_factor)
    return OPERATIONS.reducescatter(Asked(function, name, process_set), group, request)


class ReducescatterFunction(torch.autograd.Function):
    """Reducescatter whose gradient is the allgather of the gradients, times the ranks for Sum, as Horovod's."""

    @staticmethod
    def forward(ctx: Any, asked: Asked, request: ReduceRequest, *tensors: Tensor) -> Any:
        """As many tensors out as in."""
        outputs = HANDLES.synchronize(OPERATIONS.reducescatter(asked, tensors, request))
        times = checks.size_of(asked.process_set) if request.op == ReduceOp.SUM else 1
        ctx.factors = [factor for factor in (times, request.prescale, request.postscale) if factor != 1]
        ctx.asked = asked
        return outputs

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        """None for each argument before the tensors, then their gradients."""
        scaled = list(grad_outputs)
        for factor in ctx.factors:
            scaled = [gradient * factor for gradient in scaled]
        asked = ctx.asked.of_gradient()
        return None, None, *grouped_allgather(scaled, name=asked.name, process_set=asked.process_set)


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

    Differentiable: the gradient is the gathered gradients of all shares, times the number of ranks for Sum.

    Args:
        tensor: has at least one dimension and the same shape and dtype (one of allreduce()'s) on all ranks; it is not
            changed.
        name: tells concurrent operations apart; without one, ranks must make their calls in the same order.
        compression: one of hvd.Compression, as in allreduce().
        op: hvd.Average or hvd.Sum.
        process_set: the ranks that take part.
        prescale_factor: each element is multiplied by it before the reduction.
        postscale_factor: each element is multiplied by it after the reduction.

    Returns:
        A new tensor with rows / ranks rows, one more on each of the first (rows % ranks) ranks.

    Raises:
        TypeError, ValueError: for arguments that make no sense.
        HorovodInternalError: on every rank where ranks disagree.

    Examples:
        >>> hvd.reducescatter(torch.arange(3.0), op=hvd.Sum)  # on rank 1: tensor([4.])
        tensor([0., 2.])
    """
    function = "reducescatter"
    tensor_checks.check_tensor(function, tensor, tensor_checks.REDUCIBLE_DTYPES)
    request = _request(function, op, prescale_factor, postscale_factor)
    asked = Asked(function, name, process_set, waits=True)
    return reduced(ReducescatterFunction, asked, [tensor], request, compression)[0]


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: Any = Compression.none,
    op: int = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """Reducescatter several tensors as one operation.

    The other arguments, gradients and errors are those of reducescatter().

    Args:
        tensors: a list of tensors, all on one device, each as in reducescatter().

    Returns:
        A list of new tensors.

    Examples:
        >>> hvd.grouped_reducescatter([torch.ones(4), torch.ones(2)], op=hvd.Sum)
        [tensor([2., 2.]), tensor([2.])]
    """
    function = "grouped_reducescatter"
    group = tensor_checks.check_tensors(function, tensors, tensor_checks.REDUCIBLE_DTYPES)
    request = _request(function, op, prescale_factor, postscale_factor)
    asked = Asked(function, name, process_set, waits=True)
    return reduced(ReducescatterFunction, asked, group, request, compression)
