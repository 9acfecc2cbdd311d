"""Processes that Open MPI's ``mpirun`` started, also through ``hvdkitrun --mpi``: OMPI_COMM_WORLD_RANK and its like."""

from __future__ import annotations

import os
from collections.abc import Mapping

from hvdkit.environments.base import World
from hvdkit.environments.variables import Names, in_mpi_job, read_world

_NAMES = Names(
    rank="OMPI_COMM_WORLD_RANK",
    size="OMPI_COMM_WORLD_SIZE",
    local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
    local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
)
_HINT = "mpirun sets them all; unset what a former job left behind"


def detect(environ: Mapping[str, str]) -> World | None:
    """The World that Open MPI describes, None if it did not start this process."""
    world = read_world("openmpi", environ, _NAMES, _HINT)
    return None if world is None else in_mpi_job(world, environ, (_NAMES.rank, _NAMES.size))


# Between hosts Open MPI has one TCP connection for each pair of ranks, in which what announces a message waits behind
# the bytes of another: what two ranks send each other at once then takes turns, at half of the wire's speed.
WIRE = {"OMPI_MCA_btl_tcp_links": "2"}


def use_the_wire_both_ways() -> None:
    """Tell Open MPI, which reads it when it starts, unless the user has told it something else."""
    for variable, value in WIRE.items():
        os.environ.setdefault(variable, value)
