"""Sparse allreduce: every rank gets all ranks' nonzero elements, which together are the sum."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hvdkit import kernels
from hvdkit.api import checks
from hvdkit.engine.session.process_sets import ProcessSet, global_process_set
from hvdkit.kernels import ReduceOp, Scale
from hvdkit.torch.ops.framework import OPERATIONS
from hvdkit.torch.ops.gather import grouped_allgather_async
from hvdkit.torch.ops.sync import synchronize
from hvdkit.transports.gpu.device_codecs import rescale_


def sparse_allreduce_async(
    tensor: Tensor, name: str, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """Start the allreduce of a sparse COO tensor.

    Args:
        tensor: has the same shape, dtype and number of sparse dimensions on all ranks.
        name: tells concurrent operations apart.
        op: hvd.Average or hvd.Sum.
        process_set: the ranks that take part.

    Returns:
        A function that waits for the result and returns a new sparse COO tensor. In a sum, an element that several
        ranks have stands several times, and ``coalesce()`` adds them up. An average is coalesced.

    Raises:
        TypeError, ValueError: for wrong arguments.
        HorovodInternalError: by the function, if ranks disagree.

    Examples:
        >>> row = torch.zeros(4).index_fill(0, torch.tensor([hvd.rank()]), 6.0).to_sparse()
        >>> wait = hvd.sparse_allreduce_async(row, name="embedding", op=hvd.Average)
        >>> wait().to_dense()
        tensor([3., 3., 0., 0.])
    """
    function = "sparse_allreduce_async"
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{function}: tensor must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.layout != torch.sparse_coo:
        raise ValueError(f"{function}: tensor must be sparse (torch.sparse_coo), got layout {tensor.layout}")
    reduce_op = checks.check_op(function, op, (ReduceOp.AVERAGE, ReduceOp.SUM))
    # Gathering concatenates rows, so each element's indices must be a row.
    indices, values = tensor._indices().t(), tensor._values()
    OPERATIONS.reduced_elements += tensor.numel()
    handle = grouped_allgather_async([indices, values], name=name, process_set=process_set)

    def wait() -> Tensor:
        all_indices, all_values = synchronize(handle)
        gathered = torch.sparse_coo_tensor(all_indices.t(), all_values, tensor.shape, check_invariants=True)
        if reduce_op == ReduceOp.SUM:
            return gathered
        size = checks.size_of(process_set)
        with kernels.DefaultFloats():  # every rank computes it for itself
            total = gathered.coalesce()
        values = total._values()
        values = torch.view_as_real(values) if values.is_complex() else values
        if values.is_floating_point():
            rescale_(values.view(-1), Scale(divisor=size))
        else:
            torch.div(values, size, rounding_mode="trunc", out=values)
        return total

    return wait
