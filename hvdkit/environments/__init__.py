"""The launcher that started this process, and the place in the job that it gave it."""

from __future__ import annotations

import os
from collections.abc import Mapping

from hvdkit.environments import launchers
from hvdkit.environments.base import Detect, Rendezvous, World

__all__ = ["Detect", "Rendezvous", "World", "detect", "register"]

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
