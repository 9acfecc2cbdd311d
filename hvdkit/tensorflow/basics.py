"""The start of a job, and the abilities of this TensorFlow."""

from __future__ import annotations

import importlib.util
from typing import Any

import tensorflow as tf

from hvdkit.api import job


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Join the job that a launcher started; without a launcher, a job of one rank. A second call does nothing.

    Arguments and errors are those of hvdkit.torch.init().

    Examples:
        >>> hvd.init()
        >>> hvd.size()
        2
    """
    job.init(comm, process_sets)


def gloo_built() -> bool:
    """Return whether PyTorch, whose Gloo carries jobs without MPI, is installed."""
    return importlib.util.find_spec("torch") is not None


def nccl_built() -> int:
    """Return the version of PyTorch's NCCL as one number (22703 for 2.27.3), or 0 without it."""
    if not gloo_built():
        return 0
    from hvdkit.transports.gpu.nccl import nccl_version

    return nccl_version()


def cuda_built() -> bool:
    """Return whether this TensorFlow was built for CUDA, so that tensors of GPUs can be passed."""
    return bool(tf.test.is_built_with_cuda())


def rocm_built() -> bool:
    """Return whether this TensorFlow was built for ROCm."""
    return bool(tf.test.is_built_with_rocm())


def gpu_available(ext_base_name: str = "tensorflow", verbose: bool = False) -> bool:
    """Return whether TensorFlow finds a GPU.

    Args:
        ext_base_name: of Horovod, and not used; so is ``verbose``.

    Returns:
        True if there is a GPU. Raises nothing, also before init().

    Examples:
        >>> device = "GPU:0" if hvd.gpu_available() else "CPU:0"
        >>> device
        'CPU:0'
    """
    return bool(tf.config.list_physical_devices("GPU"))
