"""Waiting: for one operation, for all ranks at a barrier, and for all ranks to run out of data."""

from __future__ import annotations

from typing import Any

import torch

from hvdkit.api.checks import check_handle, check_process_set
from hvdkit.api.handles import HANDLES
from hvdkit.engine.session import runtime
from hvdkit.engine.session.process_sets import ProcessSet, global_process_set


def poll(handle: int) -> bool:
    """Whether an asynchronous operation has ended.

    Args:
        handle: what the operation returned.

    Returns:
        True if ``synchronize(handle)`` will return at once.

    Raises:
        ValueError: for a handle that is unknown or was synchronised.
        TypeError: for what is no integer.

    Examples:
        >>> handle = hvd.allreduce_async(torch.ones(3))
        >>> while not hvd.poll(handle):
        ...     pass  # do something else
        >>> hvd.synchronize(handle)
        tensor([1., 1., 1.])
    """
    return HANDLES.poll(check_handle("poll", handle))


def synchronize(handle: int) -> Any:
    """Wait for an asynchronous operation.

    Args:
        handle: what the operation returned.

    Returns:
        The operation's result, which is a tensor, and for a group a tuple of tensors; None for a handle that is unknown
        or was synchronised already.

    Raises:
        TypeError: for what is no integer.
        HorovodInternalError: on every rank if the operation failed on one.

    Examples:
        >>> handles = [hvd.allreduce_async(torch.full((2,), layer), name=f"layer {layer}") for layer in range(3)]
        >>> [hvd.synchronize(handle).tolist() for handle in handles]
        [[0, 0], [1, 1], [2, 2]]
    """
    return None if handle is None else HANDLES.synchronize(check_handle("synchronize", handle))


def join(device: int = -1) -> int:
    """Say that this rank has no more data, and block until all ranks have said so.

    Until then this rank takes part in the others' allreduces with zeros; other operations fail. It does not have what
    the others trained meanwhile: broadcast parameters and the optimizer's state from the rank that joined last.

    Args:
        device: the CUDA device of the zeros, by default the one that this rank has used or the current one.

    Returns:
        The rank that joined last.

    Raises:
        HorovodInternalError: on every rank, for another operation than an allreduce while some have joined, or if a
            rank is lost.

    Examples:
        >>> for batch in range(2 + hvd.rank()):  # rank 1 has one more
        ...     total = hvd.allreduce(torch.ones(1), name="loss", op=hvd.Sum)
        >>> hvd.join()
        1
        >>> total  # on rank 1, whose last batch met zeros: tensor([1.])
        tensor([2.])
    """
    engine = runtime.engine()
    name = None
    if "cuda" in engine.transport.device_types:
        name = f"cuda:{device if device >= 0 else torch.cuda.current_device()}"
    return int(engine.join(name).wait())


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Block until all ranks of ``process_set`` have come here.

    Args:
        process_set: the ranks that wait for each other.

    Raises:
        ValueError: on a rank that is not in the set.
        TypeError: for what is no ProcessSet.
        HorovodInternalError: if a rank is lost.

    Examples:
        >>> if hvd.rank() == 0:
        ...     torch.save(model.state_dict(), "model.pt")
        >>> hvd.barrier()
        >>> state = torch.load("model.pt")  # which is there now, on all ranks
    """
    engine = runtime.engine()
    engine.named.barrier(check_process_set("barrier", process_set)).wait()
