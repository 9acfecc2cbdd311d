"""Reading a launcher's variables: all of them or none, whole numbers in range, and an error that names what is there.

A set of variables that contradicts itself stops the process here. Guessing would start a job in which ranks wait for
each other without end.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

from hvdkit.environments.base import Rendezvous, World
from hvdkit.errors import EnvironmentConflictError


@dataclass(frozen=True)
class Names:
    """The names under which one launcher tells a process its place; None where it has no such variable."""

    rank: str
    size: str
    local_rank: str | None = None
    local_size: str | None = None
    cross_rank: str | None = None
    cross_size: str | None = None


def show(environ: Mapping[str, str], names: Iterable[str]) -> str:
    """``A=1 B=2`` of those names that are set."""
    return " ".join(f"{name}={environ[name]}" for name in names if name in environ) or "none of them"


def half_set(launcher: str, environ: Mapping[str, str], names: Iterable[str], hint: str) -> EnvironmentConflictError:
    """The error for variables of which only some are set."""
    names = list(names)
    missing = " ".join(name for name in names if name not in environ)
    return EnvironmentConflictError(
        f"the environment of {launcher} is half set: found {show(environ, names)}, missing {missing}\nHINT: {hint}"
    )


def integer(environ: Mapping[str, str], name: str) -> int:
    """The whole number, zero or larger, that the variable holds."""
    text = environ[name].strip()
    if not (text.isascii() and text.isdigit()):
        raise EnvironmentConflictError(
            f"{name}={environ[name]!r} is not a whole number of zero or more\n"
            f"HINT: unset {name}, or start the process with the launcher that sets it"
        )
    return int(text)


def _pair(environ: Mapping[str, str], index_name: str | None, count_name: str | None) -> tuple[int | None, int | None]:
    """An index and the count it must stay below; either may be missing."""
    index = integer(environ, index_name) if index_name and index_name in environ else None
    count = integer(environ, count_name) if count_name and count_name in environ else None
    if count is not None and count < 1:
        raise EnvironmentConflictError(f"{count_name}={count} must be at least 1\nHINT: unset it, or correct it")
    if index is not None and count is not None and index >= count:
        raise EnvironmentConflictError(
            f"{index_name}={index} must be smaller than {count_name}={count}\n"
            "HINT: ranks count from 0; check whether the two variables come from different launchers"
        )
    return index, count


def read_world(launcher: str, environ: Mapping[str, str], names: Names, hint: str) -> World | None:
    """The place in the job, checked, or None if this launcher set neither rank nor size.

    A size of 1 without a rank is what a leftover in a container image or a shell looks like, and means nothing.
    """
    if names.rank not in environ:
        if names.size not in environ or integer(environ, names.size) <= 1:
            return None
        raise half_set(launcher, environ, (names.rank, names.size), hint)
    if names.size not in environ:
        raise half_set(launcher, environ, (names.rank, names.size), hint)
    rank, size = _pair(environ, names.rank, names.size)
    assert rank is not None
    assert size is not None
    local_rank, local_size = _pair(environ, names.local_rank, names.local_size)
    if local_size is not None and local_size > size:
        raise EnvironmentConflictError(
            f"{names.local_size}={local_size} is larger than {names.size}={size}\n"
            "HINT: check whether the two variables come from different launchers"
        )
    cross_rank, cross_size = _pair(environ, names.cross_rank, names.cross_size)
    job = job_identifier(environ)
    return World(launcher, rank, size, local_rank, local_size, cross_rank, cross_size, job=job)


BY_HAND = ("RANK", "WORLD_SIZE")


def in_mpi_job(world: World, environ: Mapping[str, str], said: tuple[str, str]) -> World:
    """The same in an MPI job, whose ranks may also meet where MASTER_ADDR and MASTER_PORT point.

    RANK and WORLD_SIZE are harmless there while MPI's launcher says the same, in the variables ``said``.
    """
    for name, value in zip(BY_HAND, (world.rank, world.size), strict=True):
        if name in environ and integer(environ, name) != value:
            raise EnvironmentConflictError(
                f"two launchers contradict each other: {world.launcher} says {show(environ, said)}, "
                f"but torchrun's variables say {show(environ, BY_HAND)}\n"
                "HINT: unset RANK and WORLD_SIZE where mpirun or srun starts the processes, or start without MPI"
            )
    return replace(world, rendezvous=master_rendezvous(environ), mpi=True)


def port(environ: Mapping[str, str], name: str) -> int:
    """The TCP port that the variable holds."""
    value = integer(environ, name)
    if not 0 < value < 65536:
        raise EnvironmentConflictError(f"{name}={value} is not a TCP port\nHINT: choose one from 1024 to 65535")
    return value


def master_rendezvous(environ: Mapping[str, str]) -> Rendezvous | None:
    """Where MASTER_ADDR and MASTER_PORT point, if both are set; one of them alone is a leftover and means nothing."""
    if not environ.get("MASTER_ADDR") or not environ.get("MASTER_PORT"):
        return None
    return Rendezvous("tcp", environ["MASTER_ADDR"], port(environ, "MASTER_PORT"))


def job_identifier(environ: Mapping[str, str]) -> str:
    """A text that all ranks of this job share and the next job does not, as far as a launcher says one."""
    for name in ("HVDKIT_JOB", "TORCHELASTIC_RUN_ID", "PMIX_NAMESPACE"):
        if environ.get(name):
            return environ[name]
    if environ.get("SLURM_JOB_ID") and environ.get("SLURM_STEP_ID"):
        return f"{environ['SLURM_JOB_ID']}.{environ['SLURM_STEP_ID']}"
    return "0"


def nccl_host() -> str:
    """Return the host that NCCL takes this process to run on, where NCCL_HOSTID says it, else nothing."""
    return os.environ.get("NCCL_HOSTID", "")


@contextmanager
def for_a_while(values: Mapping[str, str | None]) -> Iterator[None]:
    """These values in this process's environment, None for not set: for a library that has no arguments for them."""
    before = {name: os.environ.get(name) for name in values}
    _set(values)
    try:
        yield
    finally:
        _set(before)


def _set(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
