"""Allgather: every rank gets all ranks' tensors, one after the other along the first dimension."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hvdkit.api import checks
from hvdkit.api.handles import HANDLES
from hvdkit.engine import runtime
from hvdkit.engine.process_sets import ProcessSet, global_process_set
from hvdkit.torch import tensor_checks
from hvdkit.torch.arrays import as_array, host_view
from hvdkit.torch.autograd import apply, gradient_name
from hvdkit.torch.direct import device_array, device_view, moves_directly, result_tensor
from hvdkit.torch.ops_allreduce import grouped_allreduce
from hvdkit.torch.ops_sync import synchronize


def _submit(
    function: str,
    tensors: Sequence[Tensor],
    group: bool,
    name: str | None,
    process_set: ProcessSet,
    wake: bool = True,
) -> int:
    """Check everything, hand memory to the engine, and return the number to synchronise.

    ``wake`` is False where the caller waits at once, and then drives the engine itself.
    """
    engine = runtime.engine()
    tensor_checks.check_has_rows(function, tensors)
    checks.check_name(function, name)
    process_set_id = checks.check_process_set(function, process_set)
    device = tensors[0].device
    direct = moves_directly(engine, tensors[0])
    handle = engine.allgather(
        [device_array(device_view(tensor)) if direct else as_array(host_view(tensor)) for tensor in tensors],
        name=name,
        process_set_id=process_set_id,
        device=device.type,
        wake=wake,
    )

    def finish(results: Sequence[Any]) -> Tensor | tuple[Tensor, ...]:
        outputs = tuple(result_tensor(result).to(device) for result in results)
        return outputs if group else outputs[0]

    return HANDLES.add(handle, finish)


def allgather_async(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Start an allgather and return a handle; do not change the tensor until it is synchronised. See allgather()."""
    tensor_checks.check_tensor("allgather_async", tensor, tensor_checks.MOVABLE_DTYPES)
    return _submit("allgather_async", [tensor], False, name, process_set)


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start an allgather of several tensors as one and return a handle; the result is a tuple of new tensors."""
    group = tensor_checks.check_tensors("grouped_allgather_async", tensors, tensor_checks.MOVABLE_DTYPES)
    return _submit("grouped_allgather_async", group, True, name, process_set)


class AllgatherFunction(torch.autograd.Function):
    """Allgather whose gradient is this rank's part of the gradients' average over all ranks, as Horovod's."""

    @staticmethod
    def forward(ctx: Any, function: str, name: str | None, process_set: Any, *tensors: Tensor) -> Any:
        """As many tensors out as in."""
        outputs = synchronize(_submit(function, tensors, True, name, process_set, wake=False))
        ctx.rows = [tensor.shape[0] for tensor in tensors]
        ctx.process_set = process_set
        ctx.name = gradient_name(name)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        """None for each argument before the tensors, then their gradients."""
        averages = grouped_allreduce(grad_outputs, name=ctx.name, process_set=ctx.process_set)
        rows_name = None if ctx.name is None else f"{ctx.name}.rows"
        all_rows = allgather(torch.tensor([ctx.rows]), rows_name, ctx.process_set)
        starts = all_rows[: ctx.process_set.rank()].sum(dim=0).tolist()
        parts = [
            average.narrow(0, start, rows) for average, start, rows in zip(averages, starts, ctx.rows, strict=True)
        ]
        return None, None, None, *parts


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """Concatenate the tensors of all ranks of ``process_set``, in rank order, along the first dimension.

    ``tensor`` has at least one dimension; type and all dimensions but the first are the same on all ranks. It is not
    changed. ``name`` tells concurrent operations apart; without one, ranks must make their calls in the same order.
    Differentiable: the gradient is this rank's rows of the average of all ranks' gradients.

    Returns a new tensor with the sum of all ranks' rows. Raises TypeError or ValueError for arguments that make no
    sense, HorovodInternalError on every rank where ranks disagree.
    """
    tensor_checks.check_tensor("allgather", tensor, tensor_checks.MOVABLE_DTYPES)
    output: Tensor = apply(AllgatherFunction, "allgather", name, process_set, tensor)[0]
    return output


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """Allgather several tensors as one operation. Arguments, gradients and errors are those of allgather().

    Returns a list of new tensors.
    """
    group = tensor_checks.check_tensors("grouped_allgather", tensors, tensor_checks.MOVABLE_DTYPES)
    return list(apply(AllgatherFunction, "grouped_allgather", name, process_set, *group))
