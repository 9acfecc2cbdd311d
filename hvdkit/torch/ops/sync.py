"""Waiting: for one operation, for all ranks at a barrier, and for all ranks to run out of data."""

from __future__ import annotations

from typing import Any

import torch

from hvdkit.api.checks import check_handle, check_process_set
from hvdkit.api.handles import HANDLES
from hvdkit.engine.life import runtime
from hvdkit.engine.life.process_sets import ProcessSet, global_process_set


def poll(handle: int) -> bool:
    """Whether ``synchronize(handle)`` will return at once. Raises ValueError for an unknown or synchronised handle."""
    return HANDLES.poll(check_handle("poll", handle))


def synchronize(handle: int) -> Any:
    """Wait for an asynchronous operation and return its result: a tensor, for a group a tuple of tensors.

    Returns None for a handle that is unknown or was synchronised already. Raises HorovodInternalError on every rank
    if the operation failed on one.
    """
    return None if handle is None else HANDLES.synchronize(check_handle("synchronize", handle))


def join(device: int = -1) -> int:
    """Say that this rank has no more data, and block until all ranks have said so.

    Until then this rank takes part in the others' allreduces with zeros; other operations fail. ``device``: the
    CUDA device of the zeros, by default the one that this rank has used or the current one. Returns the rank that
    joined last.
    """
    engine = runtime.engine()
    name = None
    if "cuda" in engine.transport.device_types:
        name = f"cuda:{device if device >= 0 else torch.cuda.current_device()}"
    return int(engine.join(name).wait())


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Block until all ranks of ``process_set`` have come here. Raises ValueError on a rank that is not in it."""
    engine = runtime.engine()
    engine.barrier(check_process_set("barrier", process_set)).wait()
