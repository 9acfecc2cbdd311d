"""A process's place in its job, read from a launcher's variables; variables that contradict each other are an error."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from hvdkit.errors import EnvironmentConflictError

BY_HAND = ("RANK", "WORLD_SIZE")
# hvdkitrun --mpi sets torch's variables for other libraries, and "RANK/WORLD_SIZE" here, by which it is known for that.
TORCH_PLACE = "HVDKIT_TORCH_PLACE"
_DIFFERENT_LAUNCHERS = "HINT: check whether the two variables come from different launchers; ranks count from 0"


@dataclass(frozen=True)
class Rendezvous:
    """The address at which the ranks of the ``torch`` transport meet.

    kind: "tcp": rank 0 serves a store at host:port. "agent": a launcher already serves that TCPStore. "fd": rank 0
    serves on the listening socket whose descriptor it inherited. "http": rank 0 publishes the address of its store at
    a key-value server of ``horovodrun``.
    """

    kind: str
    host: str
    port: int
    listen_fd: int | None = None


@dataclass(frozen=True)
class World:
    """The place of a process in its job. Local rank and size are None where the launcher does not set them."""

    launcher: str
    rank: int
    size: int
    local_rank: int | None = None
    local_size: int | None = None
    rendezvous: Rendezvous | None = None
    mpi: bool = False  # the launcher started an MPI job, so MPI_COMM_WORLD is this world
    job: str = "0"  # the same on all ranks of a job, different in the next job
    members: tuple[int, ...] | None = None  # the launcher's numbers of these ranks; None: all ranks
    host: str | None = None  # the launcher's name of this host, if it names hosts

    @property
    def launched(self) -> tuple[int, ...]:
        """Return the number that the launcher gave to each rank."""
        return tuple(range(self.size)) if self.members is None else self.members

    def part(self, members: Sequence[int]) -> World:
        """Return the smaller job of the ranks in ``members``, this rank among them, numbered in that order."""
        index, size, job = members.index(self.rank), len(members), f"{self.job}/{'-'.join(map(str, members))}"
        part = replace(self, rank=index, size=size, job=job, members=tuple(members))
        here = self.local_size == self.size  # all ranks are on one host, and so are the members
        return replace(part, local_rank=index if here else None, local_size=size if here else None)


# A launcher's reader: its World, None if it did not start this process. Half-set variables raise an error.
Detect = Callable[[Mapping[str, str]], World | None]


class Names(NamedTuple):
    """A launcher's variable for each field of World; "" where the launcher has none."""

    rank: str
    size: str
    local_rank: str = ""
    local_size: str = ""


def read_world(launcher: str, environ: Mapping[str, str], names: Names, hint: str) -> World | None:
    """Return the checked place in the job, or None if this launcher set neither rank nor size."""
    # A size of 1 without a rank is a leftover in a container image or a shell.
    if names.rank not in environ and (names.size not in environ or integer(environ, names.size) <= 1):
        return None
    if names.rank not in environ or names.size not in environ:
        raise half_set(launcher, environ, (names.rank, names.size), hint)
    rank, size = _pair(environ, names.rank, names.size)
    local_rank, local_size = _pair(environ, names.local_rank, names.local_size)
    assert rank is not None
    assert size is not None
    if local_size is not None and local_size > size:
        fact = f"{names.local_size}={local_size} is larger than {names.size}={size}"
        raise EnvironmentConflictError(f"{fact}\n{_DIFFERENT_LAUNCHERS}")
    return World(launcher, rank, size, local_rank, local_size, job=_job_identifier(environ))


def half_set(launcher: str, environ: Mapping[str, str], names: Sequence[str], hint: str) -> EnvironmentConflictError:
    """Return the error for variables of which only some are set."""
    missing = " ".join(name for name in names if name not in environ)
    fact = f"the environment of {launcher} is half set: found {_assignments(environ, names)}, missing {missing}"
    return EnvironmentConflictError(f"{fact}\nHINT: {hint}")


def integer(environ: Mapping[str, str], name: str) -> int:
    """Return the whole number, zero or larger, that the variable holds."""
    text = environ[name].strip()
    if not (text.isascii() and text.isdigit()):
        hint = f"unset {name}, or start the process with the launcher that sets it"
        raise EnvironmentConflictError(f"{name}={environ[name]!r} is not a whole number of zero or more\nHINT: {hint}")
    return int(text)


def port(environ: Mapping[str, str], name: str) -> int:
    """Return the TCP port that the variable holds."""
    value = integer(environ, name)
    if not 0 < value < 65536:
        raise EnvironmentConflictError(f"{name}={value} is not a TCP port\nHINT: choose one from 1024 to 65535")
    return value


def master_rendezvous(environ: Mapping[str, str]) -> Rendezvous | None:
    """Return the address in MASTER_ADDR and MASTER_PORT if both are set; a single variable is an ignored leftover."""
    if not environ.get("MASTER_ADDR") or not environ.get("MASTER_PORT"):
        return None
    return Rendezvous("tcp", environ["MASTER_ADDR"], port(environ, "MASTER_PORT"))


def in_mpi_job(world: World, environ: Mapping[str, str], names: tuple[str, str]) -> World:
    """Return the world as part of an MPI job, whose ranks may also meet at MASTER_ADDR and MASTER_PORT.

    RANK and WORLD_SIZE must agree with rank and size, which MPI's launcher set in the variables ``names``.
    """
    if environ.get(TORCH_PLACE) == "/".join(environ.get(name, "") for name in BY_HAND):
        return replace(world, mpi=True)
    for name, value in zip(BY_HAND, (world.rank, world.size), strict=True):
        if name in environ and integer(environ, name) != value:
            raise EnvironmentConflictError(
                f"two launchers contradict each other: {world.launcher} says {_assignments(environ, names)}, "
                f"but torchrun's variables say {_assignments(environ, BY_HAND)}\n"
                "HINT: unset RANK and WORLD_SIZE where mpirun or srun starts the processes, or start without MPI"
            )
    return replace(world, rendezvous=master_rendezvous(environ), mpi=True)


def _assignments(environ: Mapping[str, str], names: Iterable[str]) -> str:
    """Return ``A=1 B=2`` for the names that are set."""
    return " ".join(f"{name}={environ[name]}" for name in names if name in environ) or "none of them"


def _pair(environ: Mapping[str, str], index_name: str, count_name: str) -> tuple[int | None, int | None]:
    """Return an index and its count, None for a variable that is not set; the index must be below the count."""
    index, count = (integer(environ, name) if name in environ else None for name in (index_name, count_name))
    if count is not None and count < 1:
        raise EnvironmentConflictError(f"{count_name}={count} must be at least 1\nHINT: unset it, or correct it")
    if index is not None and count is not None and index >= count:
        fact = f"{index_name}={index} must be smaller than {count_name}={count}"
        raise EnvironmentConflictError(f"{fact}\n{_DIFFERENT_LAUNCHERS}")
    return index, count


def _job_identifier(environ: Mapping[str, str]) -> str:
    """Return a text that all ranks of this job share and the next job does not, or "0" if no launcher sets one."""
    step = ".".join(environ.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    named = (environ.get(name) for name in ("HVDKIT_JOB", "TORCHELASTIC_RUN_ID", "PMIX_NAMESPACE"))
    return next(filter(None, named), step if "." in step.strip(".") else "0")
