"""Horovod's API for PyTorch: ``import hvdkit.torch as hvd``."""

from typing import Any

from hvdkit.api import absent
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
from hvdkit.api.objects import allgather_object, broadcast_object
from hvdkit.compression import CustomCodec
from hvdkit.engine.life.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from hvdkit.errors import HorovodInternalError, PayloadError, PeerLostError, StallError
from hvdkit.torch.basics import cuda_built, gloo_built, init, nccl_built, rocm_built
from hvdkit.torch.compression import Compression
from hvdkit.torch.data_parallel.hook import DDPHook, ddp_hook
from hvdkit.torch.gradients.compression_state import merge_state_dicts
from hvdkit.torch.ops.allgather import allgather, allgather_async, grouped_allgather, grouped_allgather_async
from hvdkit.torch.ops.allreduce import (
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
)
from hvdkit.torch.ops.alltoall import alltoall, alltoall_async
from hvdkit.torch.ops.broadcast import broadcast, broadcast_, broadcast_async, broadcast_async_
from hvdkit.torch.ops.reducescatter import (
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
)
from hvdkit.torch.ops.sparse import sparse_allreduce_async
from hvdkit.torch.ops.sync import barrier, join, poll, synchronize
from hvdkit.torch.optimizer import DistributedOptimizer
from hvdkit.torch.optimizers.state import broadcast_optimizer_state
from hvdkit.torch.parameters import broadcast_parameters
from hvdkit.torch.sync_batch_norm import SyncBatchNorm


def __getattr__(name: str) -> Any:
    raise absent.attribute(__name__, name)


__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "CustomCodec",
    "DDPHook",
    "DistributedOptimizer",
    "HorovodInternalError",
    "Max",
    "Min",
    "PayloadError",
    "PeerLostError",
    "ProcessSet",
    "Product",
    "StallError",
    "Sum",
    "SyncBatchNorm",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "communication_stats",
    "compression_stats",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "ddp_hook",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "merge_state_dicts",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]
