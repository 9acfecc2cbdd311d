"""Reducescatter: a reduction of all ranks' tensors of which every rank gets its share of the rows."""

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
from hvdkit.torch.arrays import Array, as_array, as_tensor, host_copy
from hvdkit.torch.autograd import apply, gradient_name
from hvdkit.torch.compression import Compression, split_compression
from hvdkit.torch.ops_allgather import grouped_allgather
from hvdkit.torch.ops_sync import synchronize


def _submit(
    function: str,
    tensors: Sequence[Tensor],
    group: bool,
    name: str | None,
    op: int,
    process_set: ProcessSet,
    prescale_factor: float,
    postscale_factor: float,
    wake: bool = True,
    codec: Codec = CASTS["none"],
) -> int:
    """Check everything, hand host memory to the engine, and return the number to synchronise.

    ``wake`` is False where the caller waits at once, and then drives the engine itself.
    """
    engine = runtime.engine()
    tensor_checks.check_has_rows(function, tensors)
    checks.check_name(function, name)
    process_set_id = checks.check_process_set(function, process_set)
    device = tensors[0].device
    handle = engine.reducescatter(
        [as_array(host_copy(tensor)) for tensor in tensors],  # the engine uses them up
        op=checks.check_op(function, op, (ReduceOp.AVERAGE, ReduceOp.SUM)),
        prescale=checks.check_factor(function, "prescale_factor", prescale_factor),
        postscale=checks.check_factor(function, "postscale_factor", postscale_factor),
        name=name,
        process_set_id=process_set_id,
        device=device.type,
        wake=wake,
        codec=codec,
    )

    def finish(arrays: Sequence[Array]) -> Tensor | tuple[Tensor, ...]:
        outputs = tuple(as_tensor(array).to(device) for array in arrays)
        return outputs if group else outputs[0]

    return HANDLES.add(handle, finish)


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: int = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start a reducescatter and return a handle; the result is a new tensor. See reducescatter()."""
    function = "reducescatter_async"
    tensor_checks.check_tensor(function, tensor, tensor_checks.REDUCIBLE_DTYPES)
    return _submit(function, [tensor], False, name, op, process_set, prescale_factor, postscale_factor)


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: int = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start a reducescatter of several tensors as one and return a handle; the result is a tuple of new tensors."""
    function = "grouped_reducescatter_async"
    group = tensor_checks.check_tensors(function, tensors, tensor_checks.REDUCIBLE_DTYPES)
    return _submit(function, group, True, name, op, process_set, prescale_factor, postscale_factor)


class ReducescatterFunction(torch.autograd.Function):
    """Reducescatter whose gradient is the allgather of the gradients, times the ranks for Sum, as Horovod's."""

    @staticmethod
    def forward(
        ctx: Any,
        function: str,
        name: str | None,
        op: int,
        process_set: Any,
        prescale: float,
        postscale: float,
        codec: Codec,
        *tensors: Tensor,
    ) -> Any:
        """As many tensors out as in."""
        arguments = (name, op, process_set, prescale, postscale)
        outputs = synchronize(_submit(function, tensors, True, *arguments, wake=False, codec=codec))
        ctx.factor = prescale * postscale * (checks.size_of(process_set) if op == ReduceOp.SUM else 1)
        ctx.process_set = process_set
        ctx.name = gradient_name(name)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        """None for each argument before the tensors, then their gradients."""
        scaled = [gradient if ctx.factor == 1 else gradient * ctx.factor for gradient in grad_outputs]
        gathered = grouped_allgather(scaled, name=ctx.name, process_set=ctx.process_set)
        return None, None, None, None, None, None, None, *gathered


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

    ``tensor`` has at least one dimension and the same shape and type on all ranks; it is not changed. ``op`` is
    hvd.Average or hvd.Sum. Each element is multiplied by ``prescale_factor`` before and ``postscale_factor`` after the
    reduction. ``name`` tells concurrent operations apart; without one, ranks must make their calls in the same order.
    Differentiable: the gradient is the gathered gradients of all shares, times the number of ranks for Sum.

    Returns a new tensor with rows / ranks rows, one more on each of the first (rows % ranks) ranks. Raises TypeError
    or ValueError for arguments that make no sense, HorovodInternalError on every rank where ranks disagree.
    """
    function = "reducescatter"
    tensor_checks.check_tensor(function, tensor, tensor_checks.REDUCIBLE_DTYPES)
    reduce_op = checks.check_op(function, op, (ReduceOp.AVERAGE, ReduceOp.SUM))
    codec, compressor = split_compression(function, compression, reduce_op, [tensor])
    compressed, context = compressor.compress(tensor)
    arguments = (function, name, op, process_set, prescale_factor, postscale_factor, codec)
    output: Tensor = compressor.decompress(apply(ReducescatterFunction, *arguments, compressed)[0], context)
    return output


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: Any = Compression.none,
    op: int = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """Reducescatter several tensors as one operation. Arguments, gradients and errors are those of reducescatter().

    Returns a list of new tensors.
    """
    function = "grouped_reducescatter"
    group = tensor_checks.check_tensors(function, tensors, tensor_checks.REDUCIBLE_DTYPES)
    reduce_op = checks.check_op(function, op, (ReduceOp.AVERAGE, ReduceOp.SUM))
    codec, compressor = split_compression(function, compression, reduce_op, group)
    compressed, contexts = zip(*(compressor.compress(tensor) for tensor in group), strict=True)
    arguments = (function, name, op, process_set, prescale_factor, postscale_factor, codec)
    reduced = apply(ReducescatterFunction, *arguments, *compressed)
    return [compressor.decompress(tensor, context) for tensor, context in zip(reduced, contexts, strict=True)]
