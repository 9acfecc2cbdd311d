"""Processes that MPICH's or Intel MPI's ``mpiexec`` started: PMI_RANK, PMI_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS."""

from __future__ import annotations

from collections.abc import Mapping

from hvdkit.environments.base import World
from hvdkit.environments.variables import Names, in_mpi_job, read_world

_NAMES = Names(rank="PMI_RANK", size="PMI_SIZE", local_rank="MPI_LOCALRANKID", local_size="MPI_LOCALNRANKS")
_HINT = "mpiexec sets them all; unset what a former job left behind"


def detect(environ: Mapping[str, str]) -> World | None:
    """The World that PMI describes, None if no PMI launcher started this process, or srun did, which says more."""
    world = read_world("pmi", environ, _NAMES, _HINT)
    if world is None or _started_by_srun(environ):
        return None
    return in_mpi_job(world, environ, (_NAMES.rank, _NAMES.size))


def _started_by_srun(environ: Mapping[str, str]) -> bool:
    """``srun --mpi=pmi2`` serves PMI itself: no local rank in MPI's names, and Slurm's rank and size are the same.

    Under an mpiexec inside an allocation, every process carries the Slurm variables of the one that started mpiexec.
    """
    return (
        "MPI_LOCALRANKID" not in environ
        and "SLURM_STEP_ID" in environ
        and environ.get("SLURM_PROCID") == environ.get("PMI_RANK")
        and environ.get("SLURM_STEP_NUM_TASKS") == environ.get("PMI_SIZE")
    )
