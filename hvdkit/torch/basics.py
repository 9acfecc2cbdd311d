"""Start of a job, and the abilities of this PyTorch."""

from __future__ import annotations

from typing import Any

import torch

from hvdkit.api import job
from hvdkit.torch.optimizers import unwrapped
from hvdkit.transports.gpu.nccl import nccl_available, nccl_version


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Join the job that a launcher started; without a launcher, a job of one rank. A second call does nothing.

    Args:
        comm: None for all ranks, a list of ranks, or an mpi4py communicator.
        process_sets: a list of ProcessSet to register now, or "dynamic" to register them later with add_process_set().

    Raises:
        TypeError, ValueError: for wrong arguments or a wrong environment.
        NotImplementedError: for process sets made from a communicator beside a list of ranks.
        TransportUnavailableError: if MPI, or PyTorch's Gloo, cannot connect the ranks; it names the missing part.

    Examples:
        >>> hvd.init()
        >>> hvd.size()
        2
    """
    job.init(comm, process_sets, cuda=nccl_available(), for_torch=True)
    unwrapped.install()


def gloo_built() -> bool:
    """True if this PyTorch has Gloo."""
    return torch.distributed.is_available() and torch.distributed.is_gloo_available()


def nccl_built() -> int:
    """Return the version of PyTorch's NCCL as a number (22703 for 2.27.3), or 0 without NCCL or CUDA."""
    return nccl_version()


def gpu_available(ext_base_name: str = "torch", verbose: bool = False) -> bool:
    """True if PyTorch finds a GPU. The arguments are Horovod's and not used."""
    return torch.cuda.is_available()


def cuda_built() -> bool:
    """True if this PyTorch was built for CUDA, so that CUDA tensors can be passed."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """True if this PyTorch was built for ROCm."""
    return getattr(torch.version, "hip", None) is not None
