"""Start, and what this TensorFlow can do."""

from __future__ import annotations

import importlib.util
import logging
from typing import Any

import tensorflow as tf

from hvdkit.api import job

THROUGH_HOST = (
    "TensorFlow's GPU tensors travel through host memory here: correct, but slower than NCCL.\n"
    "HINT: hvdkit.torch, and hvdkit.keras with KERAS_BACKEND=torch, use NCCL."
)

logger = logging.getLogger("hvdkit")


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Join the job that a launcher started; without a launcher, a job of one rank.

    ``comm``: None for all ranks, a list of ranks, or an mpi4py communicator. ``process_sets``: a list of ProcessSet to
    register now, or "dynamic" to register them later with add_process_set(). A second call does nothing.
    Raises ValueError or TypeError for arguments or an environment that make no sense, NotImplementedError for process
    sets made from a communicator beside a list of ranks, TransportUnavailableError.
    """
    if not job.is_initialized():
        job.init(comm, process_sets)
        if job.size() > 1 and job.local_rank() == 0 and tf.config.get_visible_devices("GPU"):
            logger.warning(THROUGH_HOST)


def gloo_built() -> bool:
    """Whether PyTorch, whose Gloo carries jobs without MPI, is installed."""
    return importlib.util.find_spec("torch") is not None


def nccl_built() -> int:
    """0: tensors of GPUs travel through host memory."""
    return 0


def cuda_built() -> bool:
    """Whether this TensorFlow was built for CUDA, so that tensors of GPUs can be passed."""
    return bool(tf.test.is_built_with_cuda())


def rocm_built() -> bool:
    """Whether this TensorFlow was built for ROCm."""
    return bool(tf.test.is_built_with_rocm())


def gpu_available(ext_base_name: str = "tensorflow", verbose: bool = False) -> bool:
    """Whether TensorFlow sees a GPU. The arguments are Horovod's and not used."""
    return bool(tf.config.list_physical_devices("GPU"))
