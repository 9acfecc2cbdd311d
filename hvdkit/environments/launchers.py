"""Readers of the variables of hvdkitrun, horovodrun, torchrun, Open MPI and PMI. Slurm's are in ``srun``.

In their MPI mode, hvdkitrun and horovodrun start mpirun, whose variables give the place of a process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hvdkit.environments import base
from hvdkit.environments.base import BY_HAND, Names, Rendezvous, World, half_set, in_mpi_job, read_world

HOROVODRUN = "horovodrun"
_LISTENER = "HVDKIT_RENDEZVOUS_FD"
_FORMER_JOB = "unset what a former job left behind"
_TORCHRUN = Names(*BY_HAND, "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
_TORCHRUN_HINT = (
    "set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in every process, or start with hvdkitrun, or unset them"
)
_OPENMPI = Names(*(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")))
_PMI = Names("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")


def hvdkitrun(environ: Mapping[str, str]) -> World | None:
    """Return the World in HVDKIT_RANK and its like, None if ``hvdkitrun --gloo`` did not start this process."""
    hint = f"hvdkitrun sets them all; {_FORMER_JOB}"
    world = _world_with_rendezvous(environ, "hvdkitrun", "HVDKIT", "HVDKIT_RENDEZVOUS", "tcp", hint)
    if world is None or world.rendezvous is None or world.rank != 0 or _LISTENER not in environ:
        return world
    return replace(world, rendezvous=replace(world.rendezvous, kind="fd", listen_fd=base.integer(environ, _LISTENER)))


def horovodrun(environ: Mapping[str, str]) -> World | None:
    """Return the World in HOROVOD_RANK and its like, None if ``horovodrun --gloo`` did not start this process."""
    # horovodrun serves keys and values over HTTP, which is no TCPStore.
    hint = f"horovodrun --gloo sets them all; start with it or with hvdkitrun, or {_FORMER_JOB}"
    return _world_with_rendezvous(environ, HOROVODRUN, "HOROVOD", "HOROVOD_GLOO_RENDEZVOUS", "http", hint)


def _world_with_rendezvous(
    environ: Mapping[str, str], launcher: str, prefix: str, meeting: str, kind: str, hint: str
) -> World | None:
    parts = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
    names = Names(*(f"{prefix}_{part}" for part in parts))
    address, port_name = f"{meeting}_ADDR", f"{meeting}_PORT"
    world = read_world(launcher, environ, names, hint)
    if world is None:
        return None
    if address in environ and port_name in environ:
        return replace(world, rendezvous=Rendezvous(kind, environ[address], base.port(environ, port_name)))
    if world.size > 1:
        raise half_set(launcher, environ, (names.rank, names.size, address, port_name), hint)
    return world


def torchrun(environ: Mapping[str, str]) -> World | None:
    """Return the World in RANK and WORLD_SIZE, set by torchrun or by hand; None if they are not set."""
    world = read_world("torchrun", environ, _TORCHRUN, _TORCHRUN_HINT)
    if world is None:
        return None
    rendezvous = base.master_rendezvous(environ)
    if rendezvous is None and world.size > 1:
        raise half_set("torchrun", environ, (*BY_HAND, "MASTER_ADDR", "MASTER_PORT"), _TORCHRUN_HINT)
    if rendezvous is not None and environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        rendezvous = replace(rendezvous, kind="agent")
    return replace(world, launcher="torchrun" if _is_elastic(environ) else "by hand", rendezvous=rendezvous)


def elastic_torchrun(environ: Mapping[str, str]) -> World | None:
    """Return the World of ``torchrun`` if torch's elastic agent started this process, else None."""
    return torchrun(environ) if _is_elastic(environ) else None


def _is_elastic(environ: Mapping[str, str]) -> bool:
    return "TORCHELASTIC_RUN_ID" in environ and "RANK" in environ


def openmpi(environ: Mapping[str, str]) -> World | None:
    """Return the World in OMPI_COMM_WORLD_RANK and its like, None if Open MPI's mpirun did not start this process."""
    world = read_world("openmpi", environ, _OPENMPI, f"mpirun sets them all; {_FORMER_JOB}")
    return None if world is None else in_mpi_job(world, environ, (_OPENMPI.rank, _OPENMPI.size))


def pmi(environ: Mapping[str, str]) -> World | None:
    """Return the World that ``mpiexec`` of MPICH or Intel MPI set, None if it did not start this process.

    ``srun --mpi=pmi2`` sets PMI_RANK and PMI_SIZE too, the same as Slurm's rank and size, but no local rank in MPI's
    names. Under an mpiexec inside an allocation, every process carries the Slurm variables of mpiexec itself.
    """
    world = read_world("pmi", environ, _PMI, f"mpiexec sets them all; {_FORMER_JOB}")
    started_by_srun = (
        "MPI_LOCALRANKID" not in environ
        and "SLURM_STEP_ID" in environ
        and environ.get("SLURM_PROCID") == environ.get("PMI_RANK")
        and environ.get("SLURM_STEP_NUM_TASKS") == environ.get("PMI_SIZE")
    )
    return None if world is None or started_by_srun else in_mpi_job(world, environ, (_PMI.rank, _PMI.size))
