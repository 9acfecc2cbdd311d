"""What can carry a job: each candidate says whether it is there and why not, without importing what it would use."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from hvdkit.environments.base import World

if TYPE_CHECKING:
    from hvdkit.transports.base import Transport

AUTO = "auto"
ANSWER_SECONDS = 60.0  # of a process that only loads MPI or PyTorch


def is_installed(module: str) -> bool:
    """Whether a module can be found; it is not imported."""
    return importlib.util.find_spec(module) is not None


def succeeds(program: str) -> bool:
    """Whether a few words of Python do, in a process of their own: what they import is not imported here."""
    command = [sys.executable, "-c", program]
    try:
        answer = subprocess.run(command, capture_output=True, check=False, timeout=ANSWER_SECONDS)  # noqa: S603 (our own words)
    except subprocess.TimeoutExpired:
        return False
    return answer.returncode == 0


@dataclass(frozen=True)
class Job:
    """What is known of a job when its transport is chosen.

    ``asked``: HVDKIT_TRANSPORT. ``cuda``, ``for_torch``: whether tensors of GPUs shall travel by NCCL, and whether
    tensors are PyTorch's. ``generation``: how often these ranks have met. ``installed``: is_installed, or a test's.
    """

    world: World
    asked: str = AUTO
    cuda: bool = False
    for_torch: bool = False
    generation: int = 1
    start_timeout_seconds: float = 30.0
    installed: Callable[[str], bool] = is_installed


class Candidate(ABC):
    """One way to carry a job."""

    name: ClassVar[str]
    # How ``hvdkitrun`` starts ranks for it: "mpi" with mpirun, "gloo" one by one, None either way.
    controller: ClassVar[str | None] = "gloo"
    most_ranks: ClassVar[int | None] = None
    # False: one rank alone does without, also where it was asked for.
    carries_one_rank: ClassVar[bool] = False

    @abstractmethod
    def unavailable(self, job: Job) -> str | None:
        """Why it cannot carry ``job``, as words behind its name and perhaps a HINT; None where it can."""

    def suits(self, job: Job) -> str:
        """Why it is taken, where it can be, though nobody asked for it; "": it is not."""
        return ""

    @abstractmethod
    def open(self, job: Job) -> Transport:
        """Connect the ranks of ``job.world``. Collective. Raises TransportUnavailableError."""


class Solo(Candidate):
    """One rank alone."""

    name = "solo"
    most_ranks = 1

    def unavailable(self, job: Job) -> str | None:
        """Whether there are several."""
        return None if job.world.size == 1 else f"is for one rank, this job has {job.world.size}."

    def open(self, job: Job) -> Transport:
        """Nothing to connect."""
        from hvdkit.transports.solo import SoloTransport

        return SoloTransport()


class Mpi(Candidate):
    """MPI, where its launcher has started the ranks."""

    name = "mpi"
    controller = "mpi"
    carries_one_rank = True

    def unavailable(self, job: Job) -> str | None:
        """Whether mpi4py is missing, or the ranks are no MPI job."""
        world = job.world
        if not job.installed("mpi4py"):
            return (
                "needs mpi4py, and mpi4py is not installed.\n"
                "HINT: pip install 'hvdkit[mpi]' (mpi4py and an MPI), or set MASTER_ADDR, MASTER_PORT and "
                "HVDKIT_TRANSPORT=torch."
            )
        if world.size > 1 and not world.mpi:
            return (
                f"needs an MPI job; these {world.size} ranks were started by {world.launcher}.\n"
                "HINT: start the job with mpirun or hvdkitrun --mpi, or set HVDKIT_TRANSPORT=torch."
            )
        return None

    def suits(self, job: Job) -> str:
        """MPI's own launchers decide for it, unless NCCL shall be used, for whose ranks MPI is a place to meet."""
        if not job.world.mpi or (job.cuda and job.installed("torch") and job.installed("mpi4py")):
            return ""
        return f"started by {job.world.launcher}, mpi4py is here"

    def open(self, job: Job) -> Transport:
        """Start MPI, if the script has not."""
        from hvdkit.transports.mpi import open_mpi

        return open_mpi(job.world, job.start_timeout_seconds)


class Torch(Candidate):
    """torch.distributed's Gloo, and NCCL for tensors of GPUs."""

    name = "torch"
    carries_one_rank = True

    def unavailable(self, job: Job) -> str | None:
        """Whether PyTorch is missing. Where its ranks meet is asked when they do."""
        if job.installed("torch"):
            return None
        return "needs PyTorch.\nHINT: pip install 'hvdkit[torch]', or start the job with mpirun and hvdkit[mpi]."

    def suits(self, job: Job) -> str:
        """Wherever a launcher says where ranks can meet, or MPI can."""
        if job.world.rendezvous is None and not (job.world.mpi and job.installed("mpi4py")):
            return ""
        return "tensors on CUDA" if job.world.mpi else f"started by {job.world.launcher}"

    def open(self, job: Job) -> Transport:
        """Meet at a store."""
        from hvdkit.transports.torch_distributed import TorchTransport

        return TorchTransport(job.world, job.generation, job.start_timeout_seconds)
