"""Who am I: which launcher started this process, and what place in the job it gave it.

The innermost launcher counts. ``hvdkitrun``, ``horovodrun --gloo`` and ``torchrun`` set variables of their own and may
run inside mpirun or srun, so they come first. Then MPI's launchers, which MPI itself will agree with; then RANK and
WORLD_SIZE set by hand, then srun, whose variables everything inside an allocation inherits.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from hvdkit.environments import hvdkitrun, openmpi, pmi, srun, torchrun
from hvdkit.environments.base import Detect, Rendezvous, World

__all__ = ["Detect", "Rendezvous", "World", "detect", "register"]

_launchers: list[Detect] = [
    hvdkitrun.detect,
    hvdkitrun.detect_horovodrun,
    torchrun.detect_elastic,
    openmpi.detect,
    pmi.detect,
    srun.detect_with_pmi,
    torchrun.detect,
    srun.detect,
]


def register(launcher: Detect) -> None:
    """Ask ``launcher`` before all others who this process is; before ``hvd.init()``."""
    _launchers.insert(0, launcher)


def detect(environ: Mapping[str, str] | None = None) -> World:
    """This process's World; one rank alone if no launcher shows.

    Raises:
        EnvironmentConflictError: a launcher's variables are half set, or two launchers contradict each other.
    """
    environ = os.environ if environ is None else environ
    for launcher in _launchers:
        if (world := launcher(environ)) is not None:
            return world
    return World("none", rank=0, size=1, local_rank=0, local_size=1, cross_rank=0, cross_size=1)
