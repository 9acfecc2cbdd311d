"""The launcher that started this process, and the place in the job that it gave it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

from hvdkit.environments import launchers
from hvdkit.environments.base import Detect, Rendezvous, World
from hvdkit.errors import EnvironmentConflictError

__all__ = ["Detect", "Rendezvous", "World", "detect", "register", "world_for_torch"]

# The innermost launcher counts. hvdkitrun, horovodrun --gloo and torchrun set variables of their own and may run inside
# mpirun or srun, so they come first. MPI's launchers follow, with which MPI itself agrees. Then RANK and WORLD_SIZE set
# by hand. Everything inside an allocation inherits Slurm's variables, so plain srun is last.
_launchers: list[Detect] = [
    launchers.hvdkitrun,
    launchers.horovodrun,
    launchers.elastic_torchrun,
    launchers.openmpi,
    launchers.pmi,
    launchers.srun_with_pmi,
    launchers.torchrun,
    launchers.srun,
]

# Of torch's rendezvous; each may also be an argument.
_TORCH_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def register(launcher: Detect) -> None:
    """Try ``launcher`` before all others. Call it before ``hvd.init()``."""
    _launchers.insert(0, launcher)


def detect(environ: Mapping[str, str] | None = None) -> World:
    """Return this process's World; a single rank if no launcher started it.

    Raises:
        EnvironmentConflictError: a launcher's variables are half set, or two launchers contradict each other.
    """
    environ = os.environ if environ is None else environ
    for launcher in _launchers:
        if (world := launcher(environ)) is not None:
            return world
    return World("none", rank=0, size=1, local_rank=0, local_size=1)


def world_for_torch(given: Mapping[str, str] | None = None, environ: Mapping[str, str] | None = None) -> World | None:
    """Return the World of one of several ranks that mpirun or srun started, for ``torch.distributed``.

    Its rendezvous, None where ranks can only meet by MPI, is not that of hvdkit's own store. ``given``: the arguments
    of ``init_process_group``, as "rank". None where torch has all that it needs, these are of another job, or the
    launcher is another.
    """
    given, environ = given or {}, os.environ if environ is None else environ
    if all(environ.get(name) or name.lower() in given for name in _TORCH_VARIABLES):
        return None
    try:
        world = detect(environ)
    except EnvironmentConflictError:  # torch says which of its variables is missing
        return None
    is_served = world.size > 1 and (world.mpi or world.launcher == "srun")
    rank, size = given.get("rank", str(world.rank)), given.get("world_size", str(world.size))
    if not is_served or (rank, size) != (str(world.rank), str(world.size)):
        return None
    place = launchers.torch_rendezvous(world, environ)
    return replace(world, rendezvous=place) if world.mpi or place is not None else None
