"""Broadcast and allgather of Python objects: the length of the pickle, then its bytes."""

from __future__ import annotations

from typing import Any

import cloudpickle
import numpy as np
import numpy.typing as npt

from hvdkit.api import checks
from hvdkit.engine.ops.requests import Call
from hvdkit.engine.session import runtime
from hvdkit.engine.session.process_sets import ProcessSet, global_process_set
from hvdkit.errors import HorovodInternalError

_CANNOT_PICKLE = -1  # sent instead of a length, so that no rank waits for the bytes
Array = npt.NDArray[Any]


def _pickle(obj: Any) -> tuple[Array, Array, Exception | None]:
    """Return the pickle's length and bytes, and the error if there is no pickle."""
    try:
        payload = np.frombuffer(bytearray(cloudpickle.dumps(obj)), dtype=np.uint8)
        return np.array([len(payload)]), payload, None
    except Exception as error:
        return np.array([_CANNOT_PICKLE]), np.empty(0, dtype=np.uint8), error


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Give all ranks of ``process_set`` the object of ``root_rank``. Returns ``obj`` on the root, a copy elsewhere.

    Args:
        obj: on the root, an object that cloudpickle can pickle; ignored on other ranks.
        root_rank: counts among all ranks.
        name: tells concurrent calls of several threads apart.
        process_set: the ranks that take part.

    Raises:
        Exception: on the root, the error of pickling.
        HorovodInternalError: on other ranks if pickling failed, and on all if a rank is lost.
        TypeError, ValueError: for wrong arguments.

    Examples:
        >>> hvd.broadcast_object({"epoch": 3} if hvd.rank() == 0 else None, root_rank=0)
        {'epoch': 3}
    """
    function = "broadcast_object"
    engine = runtime.engine()
    checks.check_name(function, name)
    process_set_id = checks.check_process_set(function, process_set)
    root = checks.check_root(function, root_rank, process_set, engine.topology.size)
    base = function if name is None else name
    is_root = engine.topology.rank == root
    length, payload, error = _pickle(obj if is_root else None)
    engine.named.broadcast([length], root, Call(f"{base}.size", process_set_id, wake=False)).wait()
    if error is not None:
        raise error
    if length[0] == _CANNOT_PICKLE:
        raise HorovodInternalError(f"{function} {base!r}: rank {root} could not pickle its object")
    if not is_root:
        payload = np.empty(int(length[0]), dtype=np.uint8)
    engine.named.broadcast([payload], root, Call(f"{base}.data", process_set_id, wake=False)).wait()
    return obj if is_root else cloudpickle.loads(payload)


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Collect the objects of all ranks of ``process_set``. Returns a list of them, in rank order.

    ``obj`` is an object that cloudpickle can pickle, of any kind and size on each rank. Other arguments, and errors,
    are those of broadcast_object(); the error of pickling is raised on the rank where it failed.

    Examples:
        >>> hvd.allgather_object({"rank": hvd.rank()})
        [{'rank': 0}, {'rank': 1}]
    """
    function = "allgather_object"
    engine = runtime.engine()
    checks.check_name(function, name)
    process_set_id = checks.check_process_set(function, process_set)
    base = function if name is None else name
    length, payload, error = _pickle(obj)
    (gathered,) = engine.named.allgather([length], Call(f"{base}.size", process_set_id, wake=False)).wait()
    lengths = gathered.tolist()
    if error is not None:
        raise error
    if _CANNOT_PICKLE in lengths:
        members = process_set.ranks or range(len(lengths))
        failed = [member for member, length in zip(members, lengths, strict=True) if length == _CANNOT_PICKLE]
        raise HorovodInternalError(f"{function} {base!r}: ranks {failed} could not pickle their objects")
    (gathered,) = engine.named.allgather([payload], Call(f"{base}.data", process_set_id, wake=False)).wait()
    return [cloudpickle.loads(part) for part in np.split(gathered, np.cumsum(lengths)[:-1])]
