"""What the caller of ``init()`` may have got wrong, told before any rank waits for another."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hvdkit.engine.session.process_sets import ProcessSet


def is_communicator(comm: Any) -> bool:
    """True for an mpi4py communicator."""
    return hasattr(comm, "Get_rank") and hasattr(comm, "Get_group")


def check_comm(comm: Any) -> Any:
    """None, a communicator, or a list of ranks. Raises ValueError for anything else."""
    if comm is None or is_communicator(comm):
        return comm
    ranks = list(comm) if isinstance(comm, Iterable) and not isinstance(comm, str | bytes) else None
    if ranks is None or any(isinstance(rank, bool) or not hasattr(rank, "__index__") for rank in ranks):
        raise ValueError(
            "Invalid type of argument comm. Expected list of rank integers or mpi4py.MPI.Comm object.\n"
            f"init: comm: got {comm!r}"
        )
    return [int(rank.__index__()) for rank in ranks]


def check_process_sets(process_sets: Any, comm: Any = None) -> list[ProcessSet] | str | None:
    """None, "dynamic" in small letters, or a list of ProcessSet.

    Raises TypeError for anything else, ValueError for another string, and as Horovod NotImplementedError for sets made
    from a communicator where ``comm`` is a list of ranks.
    """
    if process_sets is None:
        return None
    expected = 'init: process_sets must be None, "dynamic" or a list of hvd.ProcessSet'
    if isinstance(process_sets, str):
        if process_sets.lower() != "dynamic":
            raise ValueError(f"{expected}, got {process_sets!r}")
        return "dynamic"
    if not isinstance(process_sets, Iterable):
        raise TypeError(f"{expected}, got {process_sets!r}")
    sets = list(process_sets)
    for index, process_set in enumerate(sets):
        if not isinstance(process_set, ProcessSet):
            raise TypeError(f"{expected}, got {process_set!r} at index {index}")
        if comm and not is_communicator(comm) and process_set.ranks is None:
            raise NotImplementedError(
                "At this time process sets defined via MPI communicators are only supported when calling hvd.init() "
                f"with comm set to a global MPI communicator.\ninit: got comm={comm!r} and {process_set}"
            )
    return sets
