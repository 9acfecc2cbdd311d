"""Communicators of mpi4py in the place of lists of ranks, in ``hvd.init()`` and process sets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hvdkit.engine.session.process_sets import ProcessSet


def is_communicator(comm: Any) -> bool:
    """True for an mpi4py communicator."""
    return hasattr(comm, "Get_rank") and hasattr(comm, "Get_group")


def resolve_ranks(process_set: ProcessSet, size: int, world_comm: Any = None) -> list[int]:
    """Return the global ranks of a set, also if it was made from a communicator. Raises ValueError outside 0..size-1.

    ``world_comm``: the communicator that was passed to ``hvd.init()``, by default MPI.COMM_WORLD.
    """
    if process_set.ranks is None:
        process_set.ranks = _ranks_in(process_set.mpi_comm, world_comm)
    ranks = process_set.ranks
    if not ranks or ranks[0] < 0 or ranks[-1] >= size:
        raise ValueError(f"ProcessSet: expected ranks from 0 to {size - 1}, got {ranks}")
    return ranks


def _ranks_in(comm: Any, world_comm: Any) -> list[int]:
    """Return the ranks of the members of ``comm`` in ``world_comm``."""
    from mpi4py import MPI

    group, world = comm.Get_group(), (world_comm or MPI.COMM_WORLD).Get_group()
    ranks = MPI.Group.Translate_ranks(group, list(range(group.Get_size())), world)
    if MPI.UNDEFINED in ranks:
        raise ValueError(
            "ProcessSet: expected a communicator whose ranks are all in the job's communicator; ranks outside of it: "
            f"{list(ranks).count(MPI.UNDEFINED)} of {group.Get_size()}"
        )
    return sorted(ranks)
