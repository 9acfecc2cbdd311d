"""Processes that Open MPI's ``mpirun`` started, also through ``hvdkitrun --mpi``: OMPI_COMM_WORLD_RANK and its like."""

from __future__ import annotations

from collections.abc import Mapping

from hvdkit.environments.base import World
from hvdkit.environments.variables import Names, job_identifier, master_rendezvous, read_place

name = "openmpi"

NAMES = Names(
    rank="OMPI_COMM_WORLD_RANK",
    size="OMPI_COMM_WORLD_SIZE",
    local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
    local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
)
_HINT = "mpirun sets them all; unset what a former job left behind"


def detect(environ: Mapping[str, str]) -> World | None:
    """The World that Open MPI describes, None if it did not start this process."""
    place = read_place(name, environ, NAMES, _HINT)
    if place is None:
        return None
    rendezvous = master_rendezvous(environ)
    return World(launcher=name, **vars(place), rendezvous=rendezvous, mpi=True, job=job_identifier(environ))
