"""Horovod's API for TensorFlow 2: ``import hvdkit.tensorflow as hvd``."""

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
from hvdkit.tensorflow.ops.broadcast import broadcast, broadcast_
from hvdkit.tensorflow.ops.gather import allgather, alltoall, grouped_allgather
from hvdkit.tensorflow.ops.reductions import allreduce, grouped_allreduce, grouped_reducescatter, reducescatter

_without_keras: ImportError | None = None
try:
    from hvdkit.tensorflow.sync_batch_norm import SyncBatchNormalization
except ImportError as error:  # operations need no Keras
    _without_keras = error


def __getattr__(name: str) -> Any:
    if name == "SyncBatchNormalization":
        raise ImportError(
            f"SyncBatchNormalization: {_without_keras}\nHINT: TF_USE_LEGACY_KERAS=1 needs tf_keras installed."
        ) from _without_keras
    raise missing_attribute(__name__, name)


def __dir__() -> list[str]:
    return sorted(__all__)


exceptions.install()

__all__ = [
    *_common.__all__,
    "Adasum",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "Max",
    "Min",
    "PartialDistributedGradientTape",
    "Product",
    "SyncBatchNormalization",
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
    "check_num_rank_power_of_2",
    "cuda_built",
    "gloo_built",
    "gpu_available",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "handle_average_backwards_compatibility",
    "init",
    "join",
    "local_rank_op",
    "local_size_op",
    "nccl_built",
    "process_set_included_op",
    "rank_op",
    "reducescatter",
    "rocm_built",
    "size_op",
]
