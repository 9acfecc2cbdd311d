"""Readers of the variables of hvdkitrun, horovodrun (both start mpirun for MPI), torchrun, Open MPI, PMI and srun."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import replace

from hvdkit.environments import base
from hvdkit.environments.base import BY_HAND, Names, Rendezvous, World, half_set, in_mpi_job, integer, read_world
from hvdkit.environments.network import LOOPBACK
from hvdkit.errors import EnvironmentConflictError

HOROVODRUN = "horovodrun"
_LISTENER = "HVDKIT_RENDEZVOUS_FD"
_FORMER_JOB = "unset the variables that a former job left behind"
_TORCHRUN = Names(*BY_HAND, "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_TORCHRUN_HINT = (
    "set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in every process, or start with hvdkitrun, or unset them"
)
_OPENMPI = Names(*(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")))
_PMI = Names("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_SRUN_HINT = "start the command with srun inside the allocation, or with hvdkitrun, or unset the SLURM_ variables"
_FIRST_SPECIAL_STEP = 0xFFFFFFF0  # Slurm numbers its batch, extern and interactive steps from the top
_FIRST_PORT, _PORTS = 20000, 12000  # below the ports that Linux hands out itself (32768 and up)
_SPAN = r"\d+(?:-\d+)?"
_PART = rf"(?:[^,\[\]]|\[{_SPAN}(?:,{_SPAN})*\])+"  # of a host list


def hvdkitrun(environ: Mapping[str, str]) -> World | None:
    """Return the World in HVDKIT_RANK and its like, None if ``hvdkitrun --gloo`` did not start this process."""
    hint = f"hvdkitrun sets them all; {_FORMER_JOB}"
    world = _world_with_rendezvous(environ, "hvdkitrun", "HVDKIT", "HVDKIT_RENDEZVOUS", "tcp", hint)
    if world is None or world.rendezvous is None or world.rank != 0 or _LISTENER not in environ:
        return world
    return replace(world, rendezvous=replace(world.rendezvous, kind="fd", listen_fd=integer(environ, _LISTENER)))


def horovodrun(environ: Mapping[str, str]) -> World | None:
    """Return the World in HOROVOD_RANK and its like, None if ``horovodrun --gloo`` did not start this process."""
    hint = f"horovodrun --gloo sets them all; start with it or with hvdkitrun, or {_FORMER_JOB}"
    return _world_with_rendezvous(environ, HOROVODRUN, "HOROVOD", "HOROVOD_GLOO_RENDEZVOUS", "http", hint)


def _world_with_rendezvous(
    environ: Mapping[str, str], launcher: str, prefix: str, meeting: str, kind: str, hint: str
) -> World | None:
    names = Names(*(f"{prefix}_{part}" for part in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")))
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


def srun(environ: Mapping[str, str]) -> World | None:
    """Return the World that Slurm describes; None in a batch script, in a shell by srun, or outside of Slurm."""
    if "SLURM_STEP_ID" not in environ or environ.get("SLURM_JOB_NAME") in ("bash", "interactive"):
        return None
    if integer(environ, "SLURM_STEP_ID") >= _FIRST_SPECIAL_STEP:
        return None
    names = Names(
        rank="SLURM_PROCID",
        size="SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS",
        local_rank="SLURM_LOCALID",
    )
    world = read_world("srun", environ, names, _SRUN_HINT)
    if world is None:
        return None
    world = replace(world, local_size=_tasks_on_this_node(environ))
    if _has_pmi(environ):
        return in_mpi_job(world, environ, ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"))
    return replace(world, rendezvous=base.master_rendezvous(environ) or _first_host(environ))


def srun_with_pmi(environ: Mapping[str, str]) -> World | None:
    """Return the World of ``srun`` if srun also serves PMI or PMIx, with which MPI starts in this task; else None."""
    return srun(environ) if _has_pmi(environ) else None


def _has_pmi(environ: Mapping[str, str]) -> bool:
    return "PMI_RANK" in environ or "PMIX_RANK" in environ


def _tasks_on_this_node(environ: Mapping[str, str]) -> int | None:
    if not environ.get("SLURM_STEP_TASKS_PER_NODE") or not environ.get("SLURM_NODEID"):
        return None
    counts, index = expand_counts(environ["SLURM_STEP_TASKS_PER_NODE"]), integer(environ, "SLURM_NODEID")
    return counts[index] if index < len(counts) else None


def torch_rendezvous(world: World, environ: Mapping[str, str]) -> Rendezvous | None:
    """Return where ranks of torch.distributed meet: MASTER_ADDR and MASTER_PORT, else a port of srun's first host."""
    place = base.master_rendezvous(environ)
    return _first_host(environ, for_torch=True) if place is None and world.launcher == "srun" else place


def _first_host(environ: Mapping[str, str], for_torch: bool = False) -> Rendezvous | None:
    """Return rank 0's host, and a port that every task of this step computes and other steps do not."""
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")
    if not nodes:
        return None
    job, step = (integer(environ, name) if name in environ else 0 for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    hosts = expand_hosts(nodes)
    # Only tasks of this step connect there: on one host, other hosts need not see it.
    host = hosts[0] if len(hosts) > 1 else LOOPBACK
    # 31 keeps the steps of neighbouring jobs apart: both numbers grow by one.
    number = job * 31 + step + (_PORTS // 2 if for_torch else 0)
    return Rendezvous("tcp", host, _FIRST_PORT + number % _PORTS)


def expand_hosts(text: str) -> list[str]:
    """Return all hosts of a host list such as ``node[01-03,7],gpu1``, in its order."""
    if not re.fullmatch(f"{_PART}(,{_PART})*", text):
        raise _malformed(text)
    hosts: list[str] = []
    for part in re.finditer(_PART, text):
        pieces = re.split(r"\[(.*?)\]", part[0])  # each second piece stood in brackets
        choices = [_numbers(piece) if index % 2 else [piece] for index, piece in enumerate(pieces)]
        hosts += map("".join, itertools.product(*choices))
    return hosts


def _numbers(spans: str) -> list[str]:
    """Return the numbers of ``01-03,7``, each with the width of the first in its span."""
    numbers = []
    for span in spans.split(","):
        first, _, last = span.partition("-")
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last or first) + 1)]
    return numbers


def expand_counts(text: str) -> list[int]:
    """Return the tasks of each node in a list such as ``2(x3),1``."""
    counts: list[int] = []
    for entry in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", entry)
        if match is None:
            raise _malformed(text)
        counts += [int(match.group(1))] * int(match.group(2) or 1)
    return counts


def _malformed(text: str) -> EnvironmentConflictError:
    hint = "set MASTER_ADDR and MASTER_PORT in every task; `scontrol show hostnames` prints the hosts of the job"
    return EnvironmentConflictError(f"cannot read Slurm's list {text!r}\nHINT: {hint}")
