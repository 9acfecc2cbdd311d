"""A job that is about to start, and the environment of its ranks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields

from hvdkit import config
from hvdkit.environments.failure_record import WANTED
from hvdkit.launch.hosts import Placement
from hvdkit.launch.options import Options
from hvdkit.launch.output import Output
from hvdkit.launch.ssh import Ssh

# Variables of a launcher around this one, which give a process its place and would contradict the rank's own.
_IDENTITY = re.compile(
    r"(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_RANK|GROUP_WORLD_SIZE|ROLE_\w+|MASTER_ADDR|MASTER_PORT"
    r"|TORCHELASTIC_\w+|OMPI_COMM_WORLD_\w+|PMI_\w+|PMIX_(?!MCA_)\w+|MPI_LOCALN?RANK\w*"
    r"|(HOROVOD|HVDKIT)_(RANK|SIZE|(LOCAL|CROSS)_(RANK|SIZE))|HOROVOD_GLOO_RENDEZVOUS_\w+|HOROVOD_HOSTNAME"
    r"|HVDKIT_(RENDEZVOUS_\w+|JOB|TRANSPORT|INIT_PIPE|TORCH_PLACE))"
)
# Variables of a single machine or login, which would be wrong or useless on another machine.
_MACHINE = re.compile(
    r"(BASH_FUNC_.*|OLDPWD|PWD|SHLVL|_|HOSTNAME|HOME|USER|LOGNAME|SHELL|MAIL|DISPLAY|XAUTHORITY|TMPDIR"
    r"|SSH_\w+|XDG_\w+|DBUS_\w+|SLURM\w*_\w+|(OMPI|PMIX|PRTE)_\w+|\w*CUDA_VISIBLE_DEVICES)"
)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class LaunchJob:
    """A job that is about to start. ``remote``: the hosts that are not this machine."""

    options: Options
    placements: list[Placement]
    remote: set[str]
    environment: dict[str, str]
    ssh: Ssh
    output: Output


def job_environment(caller: Mapping[str, str], settings: Mapping[str, str], job: str) -> dict[str, str]:
    """Return the environment that all ranks share: the caller's, without a launcher's variables, and ``settings``.

    ``settings`` come from flags and win over the caller's variables under all names of a setting: HVDKIT_CYCLE_TIME
    would otherwise win over the HOROVOD_CYCLE_TIME of a flag. A MASTER_PORT beside a RANK is that of a job around this
    one; alone it is the user's choice.
    """
    groups = [config.names_of(setting.name) for setting in fields(config.Settings)]
    overruled = {name for names in groups if not settings.keys().isdisjoint(names) for name in names}
    environment = {name: value for name, value in without_place(caller).items() if name not in overruled}
    if "MASTER_PORT" in caller and "RANK" not in caller:
        environment["MASTER_PORT"] = caller["MASTER_PORT"]
    if environment.get("HVDKIT_SECRET_FILE", "").startswith("/proc/"):
        del environment["HVDKIT_SECRET_FILE"]  # of a hvdkitrun around this one; users name other files
    environment.setdefault("PYTHONUNBUFFERED", "1")  # a killed rank would lose the last lines in its buffer
    return {**environment, **settings, "HVDKIT_JOB": job, WANTED: "1"}


def without_place(caller: Mapping[str, str]) -> dict[str, str]:
    """Return the variables without those of a launcher around this one."""
    return {name: value for name, value in caller.items() if not _IDENTITY.fullmatch(name)}


def for_other_hosts(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that make sense on another machine."""
    return {
        name: value for name, value in environment.items() if _NAME.fullmatch(name) and not _MACHINE.fullmatch(name)
    }
