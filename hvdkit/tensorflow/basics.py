"""Start, and what this TensorFlow can do."""

from __future__ import annotations

import importlib.util
from typing import Any

import tensorflow as tf

from hvdkit.api import job


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Join the job that a launcher started; without a launcher, a job of one rank. A second call does nothing.

    Args:
        comm: None for all ranks, a list of ranks, or an mpi4py communicator.
        process_sets: a list of ProcessSet to register now, or "dynamic" to register them later with add_process_set().

    Raises:
        TypeError, ValueError: for arguments or an environment that make no sense.
        NotImplementedError: for process sets made from a communicator beside a list of ranks.
        TransportUnavailableError: where MPI, or PyTorch's Gloo, cannot connect the ranks; it says what is missing.

    Examples:
        >>> hvd.init()
        >>> hvd.size()
        2
    """
    job.init(comm, process_sets)


def gloo_built() -> bool:
    """Whether PyTorch, whose Gloo carries jobs without MPI, is installed."""
    return importlib.util.find_spec("torch") is not None


def nccl_built() -> int:
    """The version of the NCCL that PyTorch has, as one number (22703 for 2.27.3), or 0 without it."""
    if importlib.util.find_spec("torch") is None:
        return 0
    from hvdkit.transports.gpu.nccl import nccl_version

    return nccl_version()


def cuda_built() -> bool:
    """Whether this TensorFlow was built for CUDA, so that tensors of GPUs can be passed."""
    return bool(tf.test.is_built_with_cuda())


def rocm_built() -> bool:
    """Whether this TensorFlow was built for ROCm."""
    return bool(tf.test.is_built_with_rocm())


def gpu_available(ext_base_name: str = "tensorflow", verbose: bool = False) -> bool:
    """Whether TensorFlow sees a GPU.

    Args:
        ext_base_name: Horovod's, and not used.
        verbose: Horovod's, and not used.

    Returns:
        True if there is one. Raises nothing, also before init().

    Examples:
        >>> device = "GPU:0" if hvd.gpu_available() else "CPU:0"
        >>> device
        'CPU:0'
    """
    return bool(tf.config.list_physical_devices("GPU"))
