"""Tasks that Slurm's ``srun`` started: SLURM_PROCID and its like, inside a job step.

A batch script carries most of these variables too, but it is not a task of a step, nor is a shell that srun opened.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hvdkit.environments.base import Rendezvous, World
from hvdkit.environments.hostlist import expand_counts, expand_hosts
from hvdkit.environments.network import LOOPBACK
from hvdkit.environments.variables import Names, in_mpi_job, integer, master_rendezvous, read_world

_HINT = "start the command with srun inside the allocation, or with hvdkitrun, or unset the SLURM_ variables"
_INTERACTIVE_JOB_NAMES = ("bash", "interactive")
_FIRST_SPECIAL_STEP = 0xFFFFFFF0  # Slurm numbers its batch, extern and interactive steps from the top
_FIRST_PORT, _PORTS = 20000, 12000  # below the ports that Linux hands out itself (32768 and up)


def detect(environ: Mapping[str, str]) -> World | None:
    """The World that Slurm describes, None if this process is no task of a step."""
    if not _is_task_of_a_step(environ):
        return None
    size_name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    names = Names(
        rank="SLURM_PROCID",
        size=size_name,
        local_rank="SLURM_LOCALID",
        cross_rank="SLURM_NODEID",
        cross_size="SLURM_STEP_NUM_NODES",
    )
    world = read_world("srun", environ, names, _HINT)
    if world is None:
        return None
    world = replace(world, local_size=_tasks_on_this_node(environ))
    if _has_pmi(environ):
        return in_mpi_job(world, environ, ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"))
    return replace(world, rendezvous=master_rendezvous(environ) or _first_host(environ))


def detect_with_pmi(environ: Mapping[str, str]) -> World | None:
    """The same, where srun also serves PMI or PMIx, so that MPI starts in this task."""
    return detect(environ) if _has_pmi(environ) else None


def _has_pmi(environ: Mapping[str, str]) -> bool:
    return "PMI_RANK" in environ or "PMIX_RANK" in environ


def _is_task_of_a_step(environ: Mapping[str, str]) -> bool:
    if "SLURM_STEP_ID" not in environ or environ.get("SLURM_JOB_NAME") in _INTERACTIVE_JOB_NAMES:
        return False
    return integer(environ, "SLURM_STEP_ID") < _FIRST_SPECIAL_STEP


def _tasks_on_this_node(environ: Mapping[str, str]) -> int | None:
    text, node = environ.get("SLURM_STEP_TASKS_PER_NODE"), environ.get("SLURM_NODEID")
    if not text or not node:
        return None
    counts, index = expand_counts(text), integer(environ, "SLURM_NODEID")
    return counts[index] if index < len(counts) else None


def _first_host(environ: Mapping[str, str]) -> Rendezvous | None:
    """Rank 0's host, and a port that every task works out alike and another step does not."""
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")
    if not nodes:
        return None
    job = integer(environ, "SLURM_JOB_ID") if "SLURM_JOB_ID" in environ else 0
    step = integer(environ, "SLURM_STEP_ID")
    # 31 keeps the steps of neighbouring jobs apart: both numbers grow by one.
    hosts = expand_hosts(nodes)
    # Nobody but this step's tasks looks for this place: on one host, other hosts need not see it.
    host = hosts[0] if len(hosts) > 1 else LOOPBACK
    return Rendezvous("tcp", host, _FIRST_PORT + (job * 31 + step) % _PORTS)
