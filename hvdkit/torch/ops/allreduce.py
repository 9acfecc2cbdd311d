"""Allreduce: every rank gets the same reduction of all ranks' tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hvdkit.api.checks import reduce_request
from hvdkit.api.operations import HANDLES, Invocation
from hvdkit.engine.ops.requests import ReduceRequest
from hvdkit.engine.session.process_sets import ProcessSet, global_process_set
from hvdkit.torch.compression import Compression, reduced
from hvdkit.torch.ops.framework import OPERATIONS, REDUCIBLE_DTYPES, apply, check_tensor, check_tensors, is_tracked


def _start(invocation: Invocation, tensors: Any, request: ReduceRequest, in_place: bool = False) -> int:
    """Check the tensors, start the allreduce and return its handle."""
    if invocation.single:  # not by check_tensors, since each call counts for small tensors
        check_tensor(invocation.function, tensors, REDUCIBLE_DTYPES, "tensor")
        return OPERATIONS.allreduce(invocation, [tensors], request, in_place)
    checked = check_tensors(invocation.function, tensors, REDUCIBLE_DTYPES)
    return OPERATIONS.allreduce(invocation, checked, request, in_place)


class AllreduceFunction(torch.autograd.Function):
    """Allreduce whose gradient is the same allreduce of the gradients, as Horovod's."""

    @staticmethod
    def forward(ctx: Any, invocation: Invocation, request: ReduceRequest, *tensors: Tensor) -> Any:
        ctx.invocation, ctx.request = invocation, request
        return HANDLES.synchronize(OPERATIONS.allreduce(invocation, tensors, request))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        """Return None for each argument before the tensors, then the reduced gradients."""
        return None, None, *apply(AllreduceFunction, ctx.invocation.of_gradient(), ctx.request, *grad_outputs)


def _differentiable(
    invocation: Invocation, tensors: Sequence[Tensor], request: ReduceRequest, compression: Any
) -> list[Tensor]:
    """Return new tensors, which autograd can differentiate."""
    if compression is Compression.none and not is_tracked(tensors):
        return list(HANDLES.synchronize(OPERATIONS.allreduce(invocation, tensors, request)))
    return reduced(AllreduceFunction, invocation, tensors, request, compression)


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start an allreduce to a new tensor. Arguments and errors are those of allreduce(). Returns a handle.

    Examples:
        >>> hvd.synchronize(hvd.allreduce_async(torch.ones(3), op=hvd.Sum))
        tensor([2., 2., 2.])
    """
    request = reduce_request("allreduce_async", op, average, prescale_factor, postscale_factor)
    return _start(Invocation("allreduce_async", name, process_set, single=True), tensor, request)


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start an allreduce in place. Arguments and errors are those of allreduce(). Returns a handle of the tensor.

    Examples:
        >>> tensor = torch.ones(3)
        >>> hvd.synchronize(hvd.allreduce_async_(tensor, op=hvd.Sum)) is tensor
        True
    """
    request = reduce_request("allreduce_async_", op, average, prescale_factor, postscale_factor)
    return _start(Invocation("allreduce_async_", name, process_set, single=True), tensor, request, in_place=True)


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Reduce over all ranks in place. Arguments and errors are those of allreduce(). Returns the tensor itself.

    Examples:
        >>> hvd.allreduce_(torch.tensor(1.0 + hvd.rank()))
        tensor(1.5000)
    """
    request = reduce_request("allreduce_", op, average, prescale_factor, postscale_factor)
    invocation = Invocation("allreduce_", name, process_set, waits=True, single=True)
    output: Tensor = HANDLES.synchronize(_start(invocation, tensor, request, in_place=True))
    return output


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Reduce a tensor over all ranks of ``process_set``; the average unless ``op`` says otherwise.

    The gradient is reduced in the same way, which is the derivative for Average and Sum.

    Args:
        tensor: has the same shape and dtype on all ranks, and is not changed. It is dense, on the CPU or on CUDA, of
            dtype uint8, int8, int16, int32, int64, float16, bfloat16, float32, float64, complex64 or complex128.
        average: the deprecated form of ``op``; True is hvd.Average, False is hvd.Sum.
        name: tells concurrent operations apart; without a name, ranks must make their calls in the same order.
        compression: one of hvd.Compression, or a class with ``compress`` and ``decompress``. The part that a lossy
            codec does not send is lost, while an optimizer would send it later.
        op: hvd.Average, Sum, Min, Max, Product or Adasum; of complex tensors Average or Sum. Averages of integers are
            cut off, not rounded.
        prescale_factor: multiplies each element before the reduction; integers in float64, cut off.
        postscale_factor: multiplies each element after the reduction, in the same way.
        process_set: the ranks that take part.

    Returns:
        A new tensor of the same shape and dtype.

    Raises:
        TypeError, ValueError: for wrong arguments.
        NotImplementedError: for Adasum on a number of ranks that is no power of two.
        HorovodInternalError: on every rank if ranks disagree.

    Examples:
        >>> hvd.allreduce(torch.tensor([1.0, 2.0]) * (1 + hvd.rank()))
        tensor([1.5000, 3.0000])
        >>> hvd.allreduce(torch.tensor(hvd.rank()), op=hvd.Max)
        tensor(1)
    """
    request = reduce_request("allreduce", op, average, prescale_factor, postscale_factor)
    group = check_tensors("allreduce", tensor, REDUCIBLE_DTYPES, single=True)
    return _differentiable(Invocation("allreduce", name, process_set, waits=True), group, request, compression)[0]


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start a grouped_allreduce(). Arguments and errors are those of grouped_allreduce(). Returns a handle of a tuple.

    Examples:
        >>> hvd.synchronize(hvd.grouped_allreduce_async([torch.ones(2), torch.ones(1)], op=hvd.Sum))
        (tensor([2., 2.]), tensor([2.]))
    """
    request = reduce_request("grouped_allreduce_async", op, average, prescale_factor, postscale_factor)
    return _start(Invocation("grouped_allreduce_async", name, process_set), tensors, request)


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start a grouped_allreduce_(). Arguments and errors are those of grouped_allreduce_(). Returns a handle.

    Examples:
        >>> hvd.synchronize(hvd.grouped_allreduce_async_([torch.ones(2), torch.ones(1)], op=hvd.Sum))
        (tensor([2., 2.]), tensor([2.]))
    """
    request = reduce_request("grouped_allreduce_async_", op, average, prescale_factor, postscale_factor)
    return _start(Invocation("grouped_allreduce_async_", name, process_set), tensors, request, in_place=True)


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> tuple[Tensor, ...]:
    """Reduce several tensors in place. Arguments and errors are those of grouped_allreduce(). Returns them as a tuple.

    Examples:
        >>> hvd.grouped_allreduce_([torch.ones(2), torch.ones(1)], op=hvd.Sum)
        (tensor([2., 2.]), tensor([2.]))
    """
    request = reduce_request("grouped_allreduce_", op, average, prescale_factor, postscale_factor)
    invocation = Invocation("grouped_allreduce_", name, process_set, waits=True)
    outputs: tuple[Tensor, ...] = HANDLES.synchronize(_start(invocation, tensors, request, in_place=True))
    return outputs


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Reduce several tensors as one operation: none starts before all are ready on all ranks.

    The other arguments, gradients and errors are those of allreduce().

    Args:
        tensors: a list of at least one tensor, all on one device, each of the same shape and dtype on all ranks.

    Returns:
        A list of new tensors.

    Examples:
        >>> hvd.grouped_allreduce([torch.ones(2), torch.tensor([hvd.rank()])], op=hvd.Sum)
        [tensor([2., 2.]), tensor([1])]
    """
    request = reduce_request("grouped_allreduce", op, average, prescale_factor, postscale_factor)
    group = check_tensors("grouped_allreduce", tensors, REDUCIBLE_DTYPES)
    return _differentiable(Invocation("grouped_allreduce", name, process_set, waits=True), group, request, compression)
