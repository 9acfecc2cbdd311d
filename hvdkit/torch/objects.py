"""Broadcast and allgather of Python objects: pickled, as a tensor of bytes whose length goes ahead."""

from __future__ import annotations

from typing import Any

import cloudpickle
import torch
from torch import Tensor

from hvdkit.engine import runtime
from hvdkit.engine.process_sets import ProcessSet, global_process_set
from hvdkit.errors import HorovodInternalError
from hvdkit.torch import checks
from hvdkit.torch.ops_allgather import allgather
from hvdkit.torch.ops_broadcast import broadcast_

# Sent instead of a length by a rank whose object cannot be pickled, so that the others do not wait for it.
_CANNOT_PICKLE = -1


def _pickle(obj: Any) -> tuple[Tensor, Exception | None]:
    try:
        return torch.frombuffer(bytearray(cloudpickle.dumps(obj)), dtype=torch.uint8), None
    except Exception as error:
        return torch.empty(0, dtype=torch.uint8), error


def _length(payload: Tensor, error: Exception | None) -> Tensor:
    return torch.tensor([len(payload) if error is None else _CANNOT_PICKLE])


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Give all ranks of ``process_set`` the object of ``root_rank``; what the others pass is ignored.

    ``name`` tells concurrent calls of several threads apart. Returns ``obj`` itself on the root, a copy elsewhere.
    Raises on the root what pickling raised, and then HorovodInternalError on the others.
    """
    function = "broadcast_object"
    engine = runtime.engine()
    checks.check_name(function, name)
    checks.check_process_set(function, process_set)
    root = checks.check_root(function, root_rank, process_set, engine.topology.size)
    base = function if name is None else name
    is_root = engine.topology.rank == root
    payload, error = _pickle(obj) if is_root else (torch.empty(0, dtype=torch.uint8), None)
    length = int(broadcast_(_length(payload, error), root, f"{base}.size", process_set))
    if error is not None:
        raise error
    if length == _CANNOT_PICKLE:
        raise HorovodInternalError(f"{function} {base!r}: rank {root} could not pickle its object")
    if not is_root:
        payload = torch.empty(length, dtype=torch.uint8)
    broadcast_(payload, root, f"{base}.data", process_set)
    return obj if is_root else cloudpickle.loads(payload.numpy())


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """The objects of all ranks of ``process_set``, in rank order.

    ``name`` tells concurrent calls of several threads apart. Raises what pickling raised where it did, and then
    HorovodInternalError on the others.
    """
    function = "allgather_object"
    runtime.engine()
    checks.check_name(function, name)
    checks.check_process_set(function, process_set)
    base = function if name is None else name
    payload, error = _pickle(obj)
    lengths = allgather(_length(payload, error), f"{base}.size", process_set).tolist()
    if error is not None:
        raise error
    if _CANNOT_PICKLE in lengths:
        members = process_set.ranks or range(len(lengths))
        failed = [member for member, length in zip(members, lengths, strict=True) if length == _CANNOT_PICKLE]
        raise HorovodInternalError(f"{function} {base!r}: ranks {failed} could not pickle their objects")
    gathered = allgather(payload, f"{base}.data", process_set)
    return [cloudpickle.loads(part.numpy()) for part in torch.split(gathered, lengths)]
