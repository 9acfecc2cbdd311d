"""Allreduce: every rank gets the same reduction of all ranks' tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hvdkit.api import checks
from hvdkit.api.handles import HANDLES
from hvdkit.compression import CASTS, Codec
from hvdkit.engine import runtime
from hvdkit.engine.process_sets import ProcessSet, global_process_set
from hvdkit.kernels.reduce_op import ReduceOp
from hvdkit.torch import tensor_checks
from hvdkit.torch.arrays import as_array, copy_back, host_copy, host_like, host_view
from hvdkit.torch.autograd import apply, gradient_name
from hvdkit.torch.compression import Compression, split_compression
from hvdkit.torch.direct import device_array, device_copy, device_view, reduces_directly, result_tensor
from hvdkit.torch.ops_sync import synchronize


def _submit(
    function: str,
    tensors: Sequence[Tensor],
    in_place: bool,
    group: bool,
    name: str | None,
    op: ReduceOp,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
    wake: bool = True,
    codec: Codec = CASTS["none"],
) -> int:
    """Check everything, hand memory to the engine, and return the number to synchronise.

    ``wake`` is False where the caller waits at once, and then drives the engine itself.
    """
    engine = runtime.engine()
    checks.check_name(function, name)
    process_set_id = checks.check_process_set(function, process_set)
    if op == ReduceOp.ADASUM:
        floating = {str(tensor.dtype).removeprefix("torch."): tensor.is_floating_point() for tensor in tensors}
        checks.check_adasum(function, floating, process_set, engine.topology.size)
    if in_place:
        tensor_checks.check_writable(function, tensors)
    prescale = checks.check_factor(function, "prescale_factor", prescale_factor)
    postscale = checks.check_factor(function, "postscale_factor", postscale_factor)
    direct = codec.name == "none" and reduces_directly(engine, tensors, op, prescale, postscale)
    sources = None
    if direct:
        buffers = [device_view(tensor) if in_place else device_copy(tensor) for tensor in tensors]
    elif in_place:
        buffers = [host_view(tensor) for tensor in tensors]
    elif wake:
        buffers = [host_copy(tensor) for tensor in tensors]
    else:  # the caller waits, so the tensors cannot change before they are read
        sources = [host_view(tensor) for tensor in tensors]
        buffers = [host_like(tensor) for tensor in tensors]
    handle = engine.allreduce(
        [device_array(buffer) if direct else as_array(buffer) for buffer in buffers],
        name=name,
        op=op,
        prescale=prescale,
        postscale=postscale,
        process_set_id=process_set_id,
        device=tensors[0].device.type,
        wake=wake,
        sources=None if sources is None else [as_array(source) for source in sources],
        codec=codec,
    )

    def finish(results: Sequence[Any]) -> Tensor | tuple[Tensor, ...]:
        reduced = [result_tensor(result) for result in results] if direct else buffers
        if in_place:
            for tensor, result in zip(tensors, reduced, strict=True):
                copy_back(tensor, result)
            outputs = tuple(tensors)
        else:
            outputs = tuple(result.to(tensor.device) for tensor, result in zip(tensors, reduced, strict=True))
        return outputs if group else outputs[0]

    return HANDLES.add(handle, finish)


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start an allreduce and return a handle; the result is a new tensor. See allreduce()."""
    function = "allreduce_async"
    reduce_op = checks.op_or_average(function, op, average)
    tensor_checks.check_tensor(function, tensor, tensor_checks.REDUCIBLE_DTYPES)
    return _submit(function, [tensor], False, False, name, reduce_op, prescale_factor, postscale_factor, process_set)


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start an allreduce in place and return a handle; leave the tensor alone until then. See allreduce()."""
    function = "allreduce_async_"
    reduce_op = checks.op_or_average(function, op, average)
    tensor_checks.check_tensor(function, tensor, tensor_checks.REDUCIBLE_DTYPES)
    return _submit(function, [tensor], True, False, name, reduce_op, prescale_factor, postscale_factor, process_set)


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Reduce over all ranks in place and return the tensor. See allreduce()."""
    function = "allreduce_"
    reduce_op = checks.op_or_average(function, op, average)
    tensor_checks.check_tensor(function, tensor, tensor_checks.REDUCIBLE_DTYPES)
    handle = _submit(
        function, [tensor], True, False, name, reduce_op, prescale_factor, postscale_factor, process_set, wake=False
    )
    output: Tensor = synchronize(handle)
    return output


class AllreduceFunction(torch.autograd.Function):
    """Allreduce whose gradient is the allreduce of the gradients, with the same operation and factors, as Horovod's."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,
        name: str | None,
        op: ReduceOp,
        prescale: float,
        postscale: float,
        process_set: Any,
        codec: Codec,
    ) -> Any:
        """One tensor in, a new one out."""
        ctx.arguments = (op, prescale, postscale, process_set, codec)
        ctx.name = gradient_name(name)
        return synchronize(
            _submit("allreduce", [tensor], False, False, name, op, prescale, postscale, process_set, False, codec)
        )

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        """The reduced gradient, and None for each of the other arguments."""
        return apply(AllreduceFunction, grad_output, ctx.name, *ctx.arguments), None, None, None, None, None, None


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

    ``tensor`` has the same shape and type on all ranks and is not changed. ``op`` is hvd.Average, Sum, Min, Max,
    Product or Adasum; ``average`` is its deprecated form. Each element is multiplied by ``prescale_factor`` before and
    ``postscale_factor`` after the reduction. Averages of integers are cut off, not rounded. ``name`` tells concurrent
    operations apart; without one, ranks must make their calls in the same order. Differentiable: the gradient is
    reduced in the same way, which is the derivative for Average and Sum. ``compression`` is one of hvd.Compression, or
    a class with ``compress`` and ``decompress``; nothing is kept here of what a codec loses, as an optimizer keeps it.

    Returns a new tensor of the same shape and type. Raises TypeError or ValueError for arguments that make no sense,
    NotImplementedError for Adasum on a number of ranks that is no power of two, and HorovodInternalError on every rank
    where ranks disagree.
    """
    reduce_op = checks.op_or_average("allreduce", op, average)
    tensor_checks.check_tensor("allreduce", tensor, tensor_checks.REDUCIBLE_DTYPES)
    codec, compressor = split_compression("allreduce", compression, reduce_op, [tensor])
    compressed, context = compressor.compress(tensor)
    arguments = (name, reduce_op, prescale_factor, postscale_factor, process_set, codec)
    output: Tensor = compressor.decompress(apply(AllreduceFunction, compressed, *arguments), context)
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
    """Start an allreduce of several tensors as one and return a handle; the result is a tuple of new tensors."""
    function = "grouped_allreduce_async"
    reduce_op = checks.op_or_average(function, op, average)
    group = tensor_checks.check_tensors(function, tensors, tensor_checks.REDUCIBLE_DTYPES)
    return _submit(function, group, False, True, name, reduce_op, prescale_factor, postscale_factor, process_set)


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start an allreduce of several tensors in place and return a handle; the result is a tuple of the tensors."""
    function = "grouped_allreduce_async_"
    reduce_op = checks.op_or_average(function, op, average)
    group = tensor_checks.check_tensors(function, tensors, tensor_checks.REDUCIBLE_DTYPES)
    return _submit(function, group, True, True, name, reduce_op, prescale_factor, postscale_factor, process_set)


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> tuple[Tensor, ...]:
    """Reduce several tensors over all ranks in place, and return them as a tuple. See grouped_allreduce()."""
    function = "grouped_allreduce_"
    reduce_op = checks.op_or_average(function, op, average)
    group = tensor_checks.check_tensors(function, tensors, tensor_checks.REDUCIBLE_DTYPES)
    handle = _submit(
        function, group, True, True, name, reduce_op, prescale_factor, postscale_factor, process_set, wake=False
    )
    outputs: tuple[Tensor, ...] = synchronize(handle)
    return outputs


class GroupedAllreduceFunction(torch.autograd.Function):
    """Grouped allreduce whose gradient is the grouped allreduce of the gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        name: str | None,
        op: ReduceOp,
        prescale: float,
        postscale: float,
        process_set: Any,
        codec: Codec,
        *tensors: Tensor,
    ) -> Any:
        """As many tensors out as in."""
        ctx.arguments = (op, prescale, postscale, process_set, codec)
        ctx.name = gradient_name(name)
        function = "grouped_allreduce"
        return synchronize(
            _submit(function, tensors, False, True, name, op, prescale, postscale, process_set, False, codec)
        )

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        """None for each argument before the tensors, then the reduced gradients."""
        reduced = apply(GroupedAllreduceFunction, ctx.name, *ctx.arguments, *grad_outputs)
        return None, None, None, None, None, None, *reduced


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

    The tensors may differ in shape and type, but are all on one device; each has the same shape and type on all
    ranks. Arguments, gradients and errors are those of allreduce(), and ValueError for an empty list.
    Returns a list of new tensors.
    """
    reduce_op = checks.op_or_average("grouped_allreduce", op, average)
    group = tensor_checks.check_tensors("grouped_allreduce", tensors, tensor_checks.REDUCIBLE_DTYPES)
    codec, compressor = split_compression("grouped_allreduce", compression, reduce_op, group)
    compressed, contexts = zip(*(compressor.compress(tensor) for tensor in group), strict=True)
    arguments = (name, reduce_op, prescale_factor, postscale_factor, process_set, codec)
    reduced = apply(GroupedAllreduceFunction, *arguments, *compressed)
    return [compressor.decompress(tensor, context) for tensor, context in zip(reduced, contexts, strict=True)]
