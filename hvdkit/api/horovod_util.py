"""The functions that scripts import from ``horovod.common.util``, with Horovod's arguments."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any

from hvdkit.api import job
from hvdkit.api.checks import num_rank_is_power_2 as num_rank_is_power_2
from hvdkit.api.gradients.planning import split_list as split_list


def mpi_built(verbose: bool = False) -> bool:
    """True if MPI can carry jobs."""
    return job.mpi_built()


def gloo_built(verbose: bool = False) -> bool:
    """True if Gloo, which comes with PyTorch, can carry jobs."""
    return find_spec("torch") is not None


def nccl_built(verbose: bool = False) -> bool:
    """True if NCCL, which comes with PyTorch for CUDA, is installed."""
    return gloo_built() and bool(importlib.import_module("hvdkit.transports.gpu.nccl").nccl_version() > 0)


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """True if a framework ("torch", "tensorflow") is installed and finds a GPU."""
    name = f"hvdkit.{ext_base_name}.basics"
    return extension_available(ext_base_name) and bool(importlib.import_module(name).gpu_available())


def ddl_built(verbose: bool = False) -> bool:
    """Return False: there is no DDL, and no CCL."""
    return False


ccl_built = ddl_built


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """True if a framework ("torch", "tensorflow") is installed."""
    return find_spec(ext_base_name) is not None


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: Any) -> None:
    """Do nothing: adapters have no native part to check."""


def is_iterable(x: Any) -> bool:
    """True if ``x`` can be iterated over."""
    return isinstance(x, Iterable)
