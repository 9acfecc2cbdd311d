"""Allreduce: every rank gets the same reduction of all ranks' tensors."""

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
from hvdkit.torch.compression import Compression, reduced
from hvdkit.torch.ops import tensor_checks
from hvdkit.torch.ops.framework import OPERATIONS, apply, is_tracked


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start an allreduce; the result is a new tensor. Arguments and errors are those of allreduce().

    Do not change the tensor until the handle is synchronised.

    Returns:
        A handle for poll() and synchronize().

    Examples:
        >>> handle = hvd.allreduce_async(torch.ones(3), op=hvd.Sum)
        >>> hvd.synchronize(handle)
        tensor([2., 2., 2.])
    """
    function = "allreduce_async"
    request = checks.reduce_request(function, op, average, prescale_factor, postscale_factor)
    tensor_checks.check_tensor(function, tensor, tensor_checks.REDUCIBLE_DTYPES)
    return OPERATIONS.allreduce(Asked(function, name, process_set, single=True), [tensor], request)


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start an allreduce in place. Arguments and errors are those of allreduce().

    Leave the tensor alone until the handle is synchronised.

    Returns:
        A handle for poll() and synchronize(), whose result is the tensor itself.

    Examples:
        >>> tensor = torch.ones(3)
        >>> hvd.synchronize(hvd.allreduce_async_(tensor, op=hvd.Sum)) is tensor
        True
        >>> tensor
        tensor([2., 2., 2.])
    """
    function = "allreduce_async_"
    request = checks.reduce_request(function, op, average, prescale_factor, postscale_factor)
    tensor_checks.check_tensor(function, tensor, tensor_checks.REDUCIBLE_DTYPES)
    return OPERATIONS.allreduce(Asked(function, name, process_set, single=True), [tensor], request, in_place=True)


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Reduce over all ranks in place. Arguments and errors are those of allreduce().

    Returns:
        The tensor itself.

    Examples:
        >>> loss = torch.tensor(1.0 + hvd.rank())
        >>> hvd.allreduce_(loss)
        tensor(1.5000)
    """
    function = "allreduce_"
    request = checks.reduce_request(function, op, average, prescale_factor, postscale_factor)
    tensor_checks.check_tensor(function, tensor, tensor_checks.REDUCIBLE_DTYPES)
    asked = Asked(function, name, process_set, waits=True, single=True)
    output: Tensor = HANDLES.synchronize(OPERATIONS.allreduce(asked, [tensor], request, in_place=True))
    return output


class AllreduceFunction(torch.autograd.Function):
    """Allreduce whose gradient is the allreduce of the gradients, with the same operation and factors, as Horovod's."""

    @staticmethod
    def forward(ctx: Any, asked: Asked, request: ReduceRequest, *tensors: Tensor) -> Any:
        """As many tensors out as in."""
        ctx.asked, ctx.request = asked, request
        return HANDLES.synchronize(OPERATIONS.allreduce(asked, tensors, request))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        """None for each argument before the tensors, then the reduced gradients."""
        return None, None, *apply(AllreduceFunction, ctx.asked.of_gradient(), ctx.request, *grad_outputs)


def _reduced(asked: Asked, tensors: Sequence[Tensor], request: ReduceRequest, compression: Any) -> list[Tensor]:
    """New tensors, which can be differentiated."""
    if compression is Compression.none and not is_tracked(tensors):
        return list(HANDLES.synchronize(OPERATIONS.allreduce(asked, tensors, request)))
    return reduced(AllreduceFunction, asked, tensors, request, compression)


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

    Differentiable: the gradient is reduced in the same way, which is the derivative for Average and Sum.

    Args:
        tensor: has the same shape and dtype on all ranks, and is not changed. It is dense, on the CPU or on CUDA, of
            dtype uint8, int8, int16, int32, int64, float16, bfloat16, float32, float64, complex64 or complex128.
        average: the deprecated form of ``op``; True is hvd.Average, False is hvd.Sum.
        name: tells concurrent operations apart; without one, ranks must make their calls in the same order.
        compression: one of hvd.Compression, or a class with ``compress`` and ``decompress``; nothing is kept here of
            what a codec loses, as an optimizer keeps it.
        op: hvd.Average, Sum, Min, Max, Product or Adasum; of complex tensors Average or Sum. Averages of integers are
            cut off, not rounded.
        prescale_factor: each element is multiplied by it before the reduction, as by ``tensor * prescale_factor``;
            integers in float64, cut off.
        postscale_factor: each element is multiplied by it after the reduction, in the same way.
        process_set: the ranks that take part.

    Returns:
        A new tensor of the same shape and dtype.

    Raises:
        TypeError, ValueError: for arguments that make no sense.
        NotImplementedError: for Adasum on a number of ranks that is no power of two.
        HorovodInternalError: on every rank where ranks disagree.

    Examples:
        >>> hvd.allreduce(torch.tensor([1.0, 2.0]) * (1 + hvd.rank()))
        tensor([1.5000, 3.0000])
        >>> hvd.allreduce(torch.tensor(hvd.rank()), op=hvd.Max)
        tensor(1)
    """
    request = checks.reduce_request("allreduce", op, average, prescale_factor, postscale_factor)
    tensor_checks.check_tensor("allreduce", tensor, tensor_checks.REDUCIBLE_DTYPES)
    asked = Asked("allreduce", name, process_set, waits=True)
    output: Tensor = _reduced(asked, [tensor], request, compression)[0]
    return output


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start an allreduce of several tensors as one. Arguments and errors are those of grouped_allreduce().

    Returns:
        A handle for poll() and synchronize(), whose result is a tuple of new tensors.

    Examples:
        >>> hvd.synchronize(hvd.grouped_allreduce_async([torch.ones(2), torch.ones(1)], op=hvd.Sum))
        (tensor([2., 2.]), tensor([2.]))
    """
    function = "grouped_allreduce_async"
    request = checks.reduce_request(function, op, average, prescale_factor, postscale_factor)
    group = tensor_checks.check_tensors(function, tensors, tensor_checks.REDUCIBLE_DTYPES)
    return OPERATIONS.allreduce(Asked(function, name, process_set), group, request)


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start an allreduce of several tensors in place. Arguments and errors are those of grouped_allreduce().

    Returns:
        A handle for poll() and synchronize(), whose result is a tuple of the tensors.

    Examples:
        >>> first, second = torch.ones(2), torch.ones(1)
        >>> _ = hvd.synchronize(hvd.grouped_allreduce_async_([first, second], op=hvd.Sum))
        >>> second
        tensor([2.])
    """
    function = "grouped_allreduce_async_"
    request = checks.reduce_request(function, op, average, prescale_factor, postscale_factor)
    group = tensor_checks.check_tensors(function, tensors, tensor_checks.REDUCIBLE_DTYPES)
    return OPERATIONS.allreduce(Asked(function, name, process_set), group, request, in_place=True)


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> tuple[Tensor, ...]:
    """Reduce several tensors over all ranks in place. Arguments and errors are those of grouped_allreduce().

    Returns:
        The tensors, as a tuple.

    Examples:
        >>> hvd.grouped_allreduce_([torch.ones(2), torch.ones(1)], op=hvd.Sum)
        (tensor([2., 2.]), tensor([2.]))
    """
    function = "grouped_allreduce_"
    request = checks.reduce_request(function, op, average, prescale_factor, postscale_factor)
    group = tensor_checks.check_tensors(function, tensors, tensor_checks.REDUCIBLE_DTYPES)
    asked = Asked(function, name, process_set, waits=True)
    outputs: tuple[Tensor, ...] = HANDLES.synchronize(OPERATIONS.allreduce(asked, group, request, in_place=True))
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
    """Reduce several tensors over all ranks as one operation: none starts before all are ready on all ranks.

    The other arguments, gradients and errors are those of allreduce(), and ValueError for an empty list.

    Args:
        tensors: a list of tensors, which may differ in shape and dtype, but are all on one device; each has the same
            shape and dtype on all ranks.

    Returns:
        A list of new tensors.

    Examples:
        >>> hvd.grouped_allreduce([torch.ones(2), torch.tensor([hvd.rank()])], op=hvd.Sum)
        [tensor([2., 2.]), tensor([1])]
    """
    request = checks.reduce_request("grouped_allreduce", op, average, prescale_factor, postscale_factor)
    group = tensor_checks.check_tensors("grouped_allreduce", tensors, tensor_checks.REDUCIBLE_DTYPES)
    return _reduced(Asked("grouped_allreduce", name, process_set, waits=True), group, request, compression)
