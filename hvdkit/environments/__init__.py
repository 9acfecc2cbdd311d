"""Who am I: which launcher started this process, and what place in the job it gave it.

The innermost launcher counts. ``hvdkitrun``, ``horovodrun --gloo`` and ``torchrun`` set variables of their own and may
run inside mpirun or srun, so they come first. Then MPI's launchers, which MPI itself will agree with; then RANK and
WORLD_SIZE set by hand, then srun, whose variables everything inside an allocation inherits.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from hvdkit.environments import horovodrun, hvdkitrun, openmpi, pmi, srun, torchrun
from hvdkit.environments.base import Environment, Rendezvous, World
from hvdkit.environments.variables import integer, show
from hvdkit.errors import EnvironmentConflictError

__all__ = ["Environment", "Rendezvous", "World", "detect"]

_BY_HAND = (torchrun.NAMES.rank, torchrun.NAMES.size)
_OF_MPI = {
    openmpi.name: (openmpi.NAMES.rank, openmpi.NAMES.size),
    pmi.name: (pmi.NAMES.rank, pmi.NAMES.size),
    srun.name: ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
}


def detect(environ: Mapping[str, str] | None = None) -> World:
    """This process's World; one rank alone if no launcher shows.

    Raises:
        EnvironmentConflictError: a launcher's variables are half set, or two launchers contradict each other.
    """
    environ = os.environ if environ is None else environ
    world = hvdkitrun.detect(environ) or horovodrun.detect(environ)
    if world is None and torchrun.is_elastic(environ):
        world = torchrun.detect(environ)
    if world is not None:
        return world
    world = openmpi.detect(environ) or pmi.detect(environ)
    if world is None and srun.has_pmi(environ):
        world = srun.detect(environ)
    if world is not None:
        _check_by_hand_agrees(world, environ)
        return world
    return torchrun.detect(environ) or srun.detect(environ) or _alone()


def _alone() -> World:
    return World("none", rank=0, size=1, local_rank=0, local_size=1, cross_rank=0, cross_size=1)


def _check_by_hand_agrees(world: World, environ: Mapping[str, str]) -> None:
    """RANK and WORLD_SIZE under MPI are harmless while they say what MPI says."""
    expected = (world.rank, world.size)
    for name, value in zip(_BY_HAND, expected, strict=True):
        if name in environ and integer(environ, name) != value:
            raise EnvironmentConflictError(
                f"two launchers contradict each other: {world.launcher} says {show(environ, _OF_MPI[world.launcher])}, "
                f"but torchrun's variables say {show(environ, _BY_HAND)}\n"
                "HINT: unset RANK and WORLD_SIZE where mpirun or srun starts the processes, or start without MPI"
            )
