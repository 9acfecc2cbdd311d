"""Horovod's API for PyTorch: ``import hvdkit.torch as hvd``."""

import importlib
from typing import Any

from hvdkit.api import common as _common
from hvdkit.api import missing_attribute
from hvdkit.api.common import *  # noqa: F403
from hvdkit.api.job import Adasum, Max, Min, Product
from hvdkit.api.objects import allgather_object, broadcast_object
from hvdkit.torch.basics import cuda_built, gloo_built, init, nccl_built, rocm_built
from hvdkit.torch.compression import Compression
from hvdkit.torch.data_parallel.hook import DDPHook, ddp_hook
from hvdkit.torch.gradients.compression_state import merge_state_dicts
from hvdkit.torch.mesh import device_mesh, process_sets_of
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
from hvdkit.torch.ops.broadcast import broadcast, broadcast_, broadcast_async, broadcast_async_
from hvdkit.torch.ops.gather import (
    allgather,
    allgather_async,
    alltoall,
    alltoall_async,
    grouped_allgather,
    grouped_allgather_async,
)
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
    if name == "elastic":
        return importlib.import_module("hvdkit.torch.elastic")
    raise missing_attribute(__name__, name)


def __dir__() -> list[str]:
    return sorted(__all__)


__all__ = [
    *_common.__all__, "Adasum", "Compression", "DDPHook", "DistributedOptimizer", "Max", "Min", "Product",
    "SyncBatchNorm", "allgather", "allgather_async", "allgather_object", "allreduce", "allreduce_", "allreduce_async",
    "allreduce_async_", "alltoall", "alltoall_async", "barrier", "broadcast", "broadcast_", "broadcast_async",
    "broadcast_async_", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters", "cuda_built",
    "ddp_hook", "device_mesh", "gloo_built", "grouped_allgather", "grouped_allgather_async", "grouped_allreduce",
    "grouped_allreduce_", "grouped_allreduce_async", "grouped_allreduce_async_", "grouped_reducescatter",
    "grouped_reducescatter_async", "init", "join", "merge_state_dicts", "nccl_built", "poll", "process_sets_of",
    "reducescatter", "reducescatter_async", "rocm_built", "sparse_allreduce_async", "synchronize",
]  # fmt: skip
