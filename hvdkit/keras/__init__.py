"""Horovod's API for Keras 3, on TensorFlow or on PyTorch: ``import hvdkit.keras as hvd``."""

from typing import Any

from hvdkit.api import absent
from hvdkit.api.job import (
    Average,
    Sum,
    ccl_built,
    communication_stats,
    compression_stats,
    cross_rank,
    cross_size,
    ddl_built,
    gloo_enabled,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    rank,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from hvdkit.api.objects import allgather_object, broadcast_object
from hvdkit.compression import CustomCodec
from hvdkit.engine.life.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from hvdkit.errors import HorovodInternalError, PayloadError, PeerLostError, StallError
from hvdkit.keras import callbacks, unwrapped
from hvdkit.keras.backend import adapter
from hvdkit.keras.functions import (
    allgather,
    allreduce,
    broadcast,
    broadcast_global_variables,
    broadcast_variables,
    reducescatter,
)
from hvdkit.keras.optimizer import DistributedOptimizer, PartialDistributedOptimizer
from hvdkit.keras.saving import load_model

unwrapped.install()

# What depends on the framework under Keras, which need not be known before it is asked for.
_OF_THE_BACKEND = (
    *("Compression", "barrier", "cuda_built", "gloo_built", "init", "join", "nccl_built"),
    "rocm_built",
)


def __getattr__(name: str) -> Any:
    if name in _OF_THE_BACKEND:
        return getattr(adapter(), name)
    raise absent.attribute(__name__, name)


__all__ = [
    "Average",
    "Compression",
    "CustomCodec",
    "DistributedOptimizer",
    "HorovodInternalError",
    "PartialDistributedOptimizer",
    "PayloadError",
    "PeerLostError",
    "ProcessSet",
    "StallError",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "barrier",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_variables",
    "callbacks",
    "ccl_built",
    "communication_stats",
    "compression_stats",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "load_model",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]
