"""What scripts import from ``horovod.common.util``."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable
from typing import Any

from hvdkit.api import job
from hvdkit.api.checks import num_rank_is_power_2 as num_rank_is_power_2
from hvdkit.api.gradients.planning import split_list as split_list


def mpi_built(verbose: bool = False) -> bool:
    """Whether MPI can carry jobs."""
    return job.mpi_built()


def gloo_built(verbose: bool = False) -> bool:
    """Whether Gloo can, which comes with PyTorch."""
    return importlib.util.find_spec("torch") is not None


def nccl_built(verbose: bool = False) -> bool:
    """Whether NCCL can, which comes with PyTorch for CUDA."""
    if not gloo_built():
        return False
    from hvdkit.transports.gpu.nccl import nccl_version

    return nccl_version() > 0


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether a framework ("torch", "tensorflow") is installed and finds a GPU."""
    if not extension_available(ext_base_name):
        return False
    adapter = importlib.import_module(f"hvdkit.{ext_base_name}.basics")
    return bool(adapter.gpu_available())


def ddl_built(verbose: bool = False) -> bool:
    """False: there is no DDL."""
    return False


def ccl_built(verbose: bool = False) -> bool:
    """False: there is no CCL."""
    return False


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether a framework ("torch", "tensorflow") is installed."""
    return importlib.util.find_spec(ext_base_name) is not None


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: Any) -> None:
    """Nothing to check: adapters have no native part."""


def is_iterable(x: Any) -> bool:
    """Whether one can iterate over something."""
    return isinstance(x, Iterable)
