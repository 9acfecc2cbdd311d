"""Which variables a rank gets: the caller's, less what another launcher left, plus the flags' and the rank's own."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import fields

from hvdkit import config
from hvdkit.environments.failure_record import WANTED
from hvdkit.launch.hosts import Slot

# What says who a process is. Left over from a launcher around this one, it would contradict what a rank is now told.
_IDENTITY = re.compile(
    r"(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_RANK|GROUP_WORLD_SIZE|ROLE_\w+|MASTER_ADDR|MASTER_PORT"
    r"|TORCHELASTIC_\w+|OMPI_COMM_WORLD_\w+|PMI_\w+|PMIX_(?!MCA_)\w+|MPI_LOCALN?RANK\w*"
    r"|(HOROVOD|HVDKIT)_(RANK|SIZE|(LOCAL|CROSS)_(RANK|SIZE))|HOROVOD_GLOO_RENDEZVOUS_\w+|HOROVOD_HOSTNAME"
    r"|HVDKIT_(RENDEZVOUS_\w+|JOB|TRANSPORT|INIT_PIPE))"
)
# What belongs to one machine or one login, and would be wrong or useless on another.
_MACHINE = re.compile(
    r"(BASH_FUNC_.*|OLDPWD|PWD|SHLVL|_|HOSTNAME|HOME|USER|LOGNAME|SHELL|MAIL|DISPLAY|XAUTHORITY|TMPDIR"
    r"|SSH_\w+|XDG_\w+|DBUS_\w+|SLURM\w*_\w+|(OMPI|PMIX|PRTE)_\w+|\w*CUDA_VISIBLE_DEVICES)"
)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def job_environment(caller: Mapping[str, str], settings: Mapping[str, str], job: str) -> dict[str, str]:
    """The variables that all ranks share. ``settings`` come from flags, which win over the caller's variables."""
    overruled = _other_names(settings)
    environment = {
        name: value for name, value in caller.items() if not _IDENTITY.fullmatch(name) and name not in overruled
    }
    if environment.get("HVDKIT_SECRET_FILE", "").startswith("/proc/"):
        del environment["HVDKIT_SECRET_FILE"]  # of the hvdkitrun around this one; a user names a file with a name
    environment.setdefault("PYTHONUNBUFFERED", "1")  # or the last lines of a killed rank would be lost in its buffer
    environment.update(settings)
    environment["HVDKIT_JOB"] = job
    environment[WANTED] = "1"
    return environment


def _other_names(settings: Mapping[str, str]) -> set[str]:
    """All names of these settings: HVDKIT_CYCLE_TIME would win over the HOROVOD_CYCLE_TIME that a flag sets."""
    names = [config.names_of(setting.name) for setting in fields(config.Settings)]
    return {name for group in names if not settings.keys().isdisjoint(group) for name in group}


def first_on_python_path(environment: Mapping[str, str], folder: str) -> dict[str, str]:
    """The variables with which Python looks into a folder before it looks for what is installed."""
    others = environment.get("PYTHONPATH")
    return {**environment, "PYTHONPATH": folder if not others else f"{folder}{os.pathsep}{others}"}


def slot_environment(slot: Slot) -> dict[str, str]:
    """The variables that tell a rank its place."""
    return {
        "HVDKIT_RANK": str(slot.rank),
        "HVDKIT_SIZE": str(slot.size),
        "HVDKIT_LOCAL_RANK": str(slot.local_rank),
        "HVDKIT_LOCAL_SIZE": str(slot.local_size),
        "HVDKIT_CROSS_RANK": str(slot.cross_rank),
        "HVDKIT_CROSS_SIZE": str(slot.cross_size),
    }


def for_other_hosts(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that make sense on another machine."""
    return {
        name: value for name, value in environment.items() if _NAME.fullmatch(name) and not _MACHINE.fullmatch(name)
    }
