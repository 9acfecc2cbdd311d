"""Horovod's API for TensorFlow 2: ``import hvdkit.tensorflow as hvd``."""

import importlib
from contextlib import suppress
from typing import Any

from hvdkit.api import common as _common
from hvdkit.api import missing_attribute
from hvdkit.api.checks import handle_average_backwards_compatibility
from hvdkit.api.checks import num_rank_is_power_2 as check_num_rank_power_of_2
from hvdkit.api.common import *  # noqa: F403
from hvdkit.api.job import Adasum, Max, Min, Product
from hvdkit.tensorflow.basics import (
    barrier,
    cuda_built,
    gloo_built,
    gpu_available,
    init,
    join,
    local_rank_op,
    local_size_op,
    nccl_built,
    process_set_included_op,
    rank_op,
    rocm_built,
    size_op,
)
from hvdkit.tensorflow.compression import Compression
from hvdkit.tensorflow.for_keras import DistributedOptimizer
from hvdkit.tensorflow.functions import (
    allgather_object,
    broadcast_global_variables,
    broadcast_object,
    broadcast_object_fn,
    broadcast_variables,
)
from hvdkit.tensorflow.gradient_tape import DistributedGradientTape, PartialDistributedGradientTape
from hvdkit.tensorflow.ops import exceptions
from hvdkit.tensorflow.ops.reductions import allreduce, grouped_allreduce, grouped_reducescatter, reducescatter
from hvdkit.tensorflow.ops.transfers import allgather, alltoall, broadcast, broadcast_, grouped_allgather

with suppress(ImportError):  # operations need no Keras
    from hvdkit.tensorflow.sync_batch_norm import SyncBatchNormalization


def __getattr__(name: str) -> Any:
    if name == "elastic":
        return importlib.import_module("hvdkit.tensorflow.elastic")
    if name == "SyncBatchNormalization":
        try:
            return importlib.import_module("hvdkit.tensorflow.sync_batch_norm").SyncBatchNormalization
        except ImportError as error:
            hint = "TF_USE_LEGACY_KERAS=1 needs tf_keras installed."
            raise ImportError(f"SyncBatchNormalization: {error}\nHINT: {hint}") from error
    raise missing_attribute(__name__, name)


def __dir__() -> list[str]:
    return sorted(__all__)


exceptions.install()

__all__ = [*_common.__all__, "Adasum", "Compression", "Max", "Min", "Product", "SyncBatchNormalization"]
__all__ += ["DistributedGradientTape", "DistributedOptimizer", "PartialDistributedGradientTape"]
__all__ += ["allgather", "allreduce", "alltoall", "barrier", "broadcast", "broadcast_", "join", "reducescatter"]
__all__ += ["grouped_allgather", "grouped_allreduce", "grouped_reducescatter"]
__all__ += ["allgather_object", "broadcast_object", "broadcast_object_fn"]
__all__ += ["broadcast_global_variables", "broadcast_variables"]
__all__ += ["local_rank_op", "local_size_op", "process_set_included_op", "rank_op", "size_op"]
__all__ += ["cuda_built", "gloo_built", "gpu_available", "init", "nccl_built", "rocm_built"]
__all__ += ["check_num_rank_power_of_2", "handle_average_backwards_compatibility"]
