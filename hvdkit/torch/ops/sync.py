"""Functions that wait: for an operation, for all ranks at a barrier, and until all ranks are out of data."""

from __future__ import annotations

from typing import Any

import torch

from hvdkit.api.checks import check_handle, check_process_set
from hvdkit.api.operations import HANDLES
from hvdkit.engine.session import runtime
from hvdkit.engine.session.process_sets import ProcessSet, global_process_set


def poll(handle: int) -> bool:
    """True if ``synchronize(handle)`` returns at once, because the asynchronous operation has ended.

    Raises ValueError if ``handle`` is unknown or was synchronised, TypeError unless it is an integer. Returns a bool.

    Examples:
        >>> handle = hvd.allreduce_async(torch.ones(3))
        >>> while not hvd.poll(handle):
        ...     pass  # do something else
    """
    return HANDLES.poll(check_handle("poll", handle))


def synchronize(handle: int) -> Any:
    """Wait for the asynchronous operation that returned ``handle``; until then do not change or use its tensors.

    Returns:
        The operation's result, a tensor or a tuple of tensors; None for an unknown or a synchronised handle.

    Raises:
        TypeError: unless it is an integer.
        HorovodInternalError: on every rank if the operation failed on a rank.

    Examples:
        >>> handles = [hvd.allreduce_async(torch.full((2,), layer), name=f"layer {layer}") for layer in range(3)]
        >>> [hvd.synchronize(handle).tolist() for handle in handles]
        [[0, 0], [1, 1], [2, 2]]
    """
    return None if handle is None else HANDLES.synchronize(check_handle("synchronize", handle))


def join(device: int = -1) -> int:
    """Tell all ranks that this rank has no more data, and block until all ranks have joined.

    Until then this rank adds zeros to the other ranks' allreduces; their other operations fail. Broadcast parameters
    and the optimizer's state afterwards, from the rank that joined last.

    Args:
        device: the CUDA device of the zeros; by default the device that this rank has used, or the current device.

    Returns:
        The rank that joined last.

    Raises:
        HorovodInternalError: on every rank, for another operation than an allreduce after a rank has joined, or if a
            rank is lost.

    Examples:
        >>> for batch in range(2 + hvd.rank()):  # rank 1 has one more
        ...     total = hvd.allreduce(torch.ones(1), name="loss", op=hvd.Sum)
        >>> hvd.join()
        1
        >>> total  # on rank 1, whose last batch is added to zeros: tensor([1.])
        tensor([2.])
    """
    engine, name = runtime.engine(), None
    if "cuda" in engine.transport.device_types:
        name = f"cuda:{device if device >= 0 else torch.cuda.current_device()}"
    return int(engine.join(name).wait())


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Block until all ranks of ``process_set`` have called it. Raises errors for a wrong set, and if a rank is lost.

    Examples:
        >>> if hvd.rank() == 0:
        ...     torch.save(model.state_dict(), "model.pt")
        >>> hvd.barrier()
        >>> state = torch.load("model.pt")  # which is there now, on all ranks
    """
    runtime.engine().named.barrier(check_process_set("barrier", process_set)).wait()
