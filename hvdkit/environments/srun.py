"""Tasks of a job step that Slurm's ``srun`` started: SLURM_PROCID and its like, and Slurm's short forms of lists.

A batch script carries most of these variables too, but neither it nor a shell that srun opened is a task of a step.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import replace

from hvdkit.environments.base import Names, Rendezvous, World, in_mpi_job, integer, master_rendezvous, read_world
from hvdkit.environments.network import LOOPBACK
from hvdkit.errors import EnvironmentConflictError

_HINT = "start the command with srun inside the allocation, or with hvdkitrun, or unset the SLURM_ variables"
_FIRST_SPECIAL_STEP = 0xFFFFFFF0  # Slurm numbers its batch, extern and interactive steps from the top
_FIRST_PORT, _PORTS = 20000, 12000  # below the ports that Linux hands out itself (32768 and up)
_SPAN = r"\d+(?:-\d+)?"
_PART = rf"(?:[^,\[\]]|\[{_SPAN}(?:,{_SPAN})*\])+"  # of a host list


def srun(environ: Mapping[str, str]) -> World | None:
    """Return the World that Slurm describes, None if this process is no task of a step."""
    if "SLURM_STEP_ID" not in environ or environ.get("SLURM_JOB_NAME") in ("bash", "interactive"):
        return None
    if integer(environ, "SLURM_STEP_ID") >= _FIRST_SPECIAL_STEP:
        return None
    names = Names(
        rank="SLURM_PROCID",
        size="SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS",
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


def srun_with_pmi(environ: Mapping[str, str]) -> World | None:
    """Return the World of ``srun`` if srun also serves PMI or PMIx, with which MPI starts in this task; else None."""
    return srun(environ) if _has_pmi(environ) else None


def _has_pmi(environ: Mapping[str, str]) -> bool:
    return "PMI_RANK" in environ or "PMIX_RANK" in environ


def _tasks_on_this_node(environ: Mapping[str, str]) -> int | None:
    text, node = environ.get("SLURM_STEP_TASKS_PER_NODE"), environ.get("SLURM_NODEID")
    if not text or not node:
        return None
    counts, index = expand_counts(text), integer(environ, "SLURM_NODEID")
    return counts[index] if index < len(counts) else None


def _first_host(environ: Mapping[str, str]) -> Rendezvous | None:
    """Return rank 0's host, and a port that every task of this step computes and other steps do not."""
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")
    if not nodes:
        return None
    job = integer(environ, "SLURM_JOB_ID") if "SLURM_JOB_ID" in environ else 0
    step = integer(environ, "SLURM_STEP_ID")
    hosts = expand_hosts(nodes)
    # Only tasks of this step connect there: on one host, other hosts need not see it.
    host = hosts[0] if len(hosts) > 1 else LOOPBACK
    # 31 keeps the steps of neighbouring jobs apart: both numbers grow by one.
    return Rendezvous("tcp", host, _FIRST_PORT + (job * 31 + step) % _PORTS)


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
    return EnvironmentConflictError(
        f"cannot read Slurm's list {text!r}\n"
        "HINT: set MASTER_ADDR and MASTER_PORT in every task; `scontrol show hostnames` prints what Slurm means"
    )
