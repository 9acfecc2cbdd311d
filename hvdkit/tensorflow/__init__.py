"""Horovod's API for TensorFlow 2: ``import hvdkit.tensorflow as hvd``."""

from typing import Any

from hvdkit.api import absent
from hvdkit.api.checks import handle_average_backwards_compatibility
from hvdkit.api.checks import num_rank_is_power_2 as check_num_rank_power_of_2
from hvdkit.api.job import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
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
from hvdkit.compression import CustomCodec
from hvdkit.engine.life.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from hvdkit.errors import HorovodInternalError, PayloadError, PeerLostError, StallError
from hvdkit.tensorflow.basics import cuda_built, gloo_built, gpu_available, init, nccl_built, rocm_built
from hvdkit.tensorflow.compression import Compression
from hvdkit.tensorflow.functions import (
    allgather_object,
    broadcast_global_variables,
    broadcast_object,
    broadcast_object_fn,
    broadcast_variables,
)
from hvdkit.tensorflow.gradient_tape import DistributedGradientTape, PartialDistributedGradientTape
from hvdkit.tensorflow.ops import exceptions
from hvdkit.tensorflow.ops.allreduce import allreduce, grouped_allreduce
from hvdkit.tensorflow.ops.broadcast import broadcast, broadcast_
from hvdkit.tensorflow.ops.gather import allgather, alltoall, grouped_allgather
from hvdkit.tensorflow.ops.ranks import (
    barrier,
    join,
    local_rank_op,
    local_size_op,
    process_set_included_op,
    rank_op,
    size_op,
)
from hvdkit.tensorflow.ops.reducescatter import grouped_reducescatter, reducescatter
from hvdkit.tensorflow.optimizer import DistributedOptimizer

_without_keras: ImportError | None = None
try:
    from hvdkit.tensorflow.sync_batch_norm import SyncBatchNormalization
except ImportError as error:  # operations need no Keras
    _without_keras = error


def __getattr__(name: str) -> Any:
    """Say what is missing, to those who want it."""
    if name == "SyncBatchNormalization":
        raise ImportError(
            f"SyncBatchNormalization: {_without_keras}\nHINT: TF_USE_LEGACY_KERAS=1 needs tf_keras installed."
        ) from _without_keras
    raise absent.attribute(__name__, name)


exceptions.install()

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "CustomCodec",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "HorovodInternalError",
    "Max",
    "Min",
    "PartialDistributedGradientTape",
    "PayloadError",
    "PeerLostError",
    "ProcessSet",
    "Product",
    "StallError",
    "Sum",
    "SyncBatchNormalization",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "ccl_built",
    "check_num_rank_power_of_2",
    "communication_stats",
    "compression_stats",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "gpu_available",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "handle_average_backwards_compatibility",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_rank_op",
    "local_size",
    "local_size_op",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "process_set_included_op",
    "rank",
    "rank_op",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "size_op",
    "start_timeline",
    "stop_timeline",
]
