"""Horovod's API for Keras 3, on TensorFlow or on PyTorch: ``import hvdkit.keras as hvd``."""

import importlib
from typing import Any

from hvdkit.api import common as _common
from hvdkit.api import missing_attribute
from hvdkit.api.common import *  # noqa: F403
from hvdkit.api.objects import allgather_object, broadcast_object
from hvdkit.keras import callbacks, unwrapped
from hvdkit.keras.functions import (
    adapter,
    allgather,
    allreduce,
    broadcast,
    broadcast_global_variables,
    broadcast_variables,
    reducescatter,
)
from hvdkit.keras.optimizer import DistributedOptimizer, PartialDistributedOptimizer, load_model

unwrapped.install()

# Names of the framework's adapter, which is imported when a name is used.
_OF_THE_BACKEND = ["Compression", "barrier", "cuda_built", "gloo_built", "init", "join", "nccl_built", "rocm_built"]


def __getattr__(name: str) -> Any:
    if name == "elastic":
        return importlib.import_module("hvdkit.keras.elastic")
    if name in _OF_THE_BACKEND:
        return getattr(adapter(), name)
    raise missing_attribute(__name__, name)


def __dir__() -> list[str]:
    return sorted(__all__)


__all__ = [*_common.__all__, *_OF_THE_BACKEND]
__all__ += ["DistributedOptimizer", "PartialDistributedOptimizer", "callbacks", "load_model"]
__all__ += ["allgather", "allgather_object", "allreduce", "broadcast", "broadcast_object", "reducescatter"]
__all__ += ["broadcast_global_variables", "broadcast_variables"]
