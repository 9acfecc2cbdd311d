"""Sparse allreduce: every rank gets all ranks' nonzero elements, which together are the sum."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hvdkit.api import checks
from hvdkit.engine.process_sets import ProcessSet, global_process_set
from hvdkit.kernels.reduce_op import ReduceOp
from hvdkit.torch.ops_allgather import grouped_allgather_async
from hvdkit.torch.ops_sync import synchronize


def sparse_allreduce_async(
    tensor: Tensor, name: str, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """Start the allreduce of a sparse COO tensor and return a function that waits for it and returns the result.

    ``tensor`` has the same shape, type and number of sparse dimensions on all ranks and any number of nonzero
    elements; it is not changed. ``op`` is hvd.Average or hvd.Sum. The result is a new sparse COO tensor in which an
    element that several ranks have stands several times: ``coalesce()`` adds them up. Raises TypeError or ValueError
    for arguments that make no sense; the function raises HorovodInternalError where ranks disagree.
    """
    function = "sparse_allreduce_async"
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{function}: tensor must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.layout != torch.sparse_coo:
        raise ValueError(f"{function}: tensor must be sparse (torch.sparse_coo), got layout {tensor.layout}")
    reduce_op = checks.check_op(function, op, (ReduceOp.AVERAGE, ReduceOp.SUM))
    # Gathering concatenates rows, so each element's indices must be a row.
    indices, values = tensor._indices().t(), tensor._values()
    handle = grouped_allgather_async([indices, values], name=name, process_set=process_set)

    def wait() -> Tensor:
        all_indices, all_values = synchronize(handle)
        if reduce_op == ReduceOp.AVERAGE:
            rounding = None if all_values.is_floating_point() else "trunc"
            all_values = torch.div(all_values, checks.size_of(process_set), rounding_mode=rounding)
        return torch.sparse_coo_tensor(all_indices.t(), all_values, tensor.shape, check_invariants=True)

    return wait
