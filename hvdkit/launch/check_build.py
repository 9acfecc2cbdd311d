"""``hvdkitrun --check-build``: which frameworks, transports and kernels this installation can use."""

from __future__ import annotations

import importlib
import importlib.metadata
import platform
from collections.abc import Iterable

import hvdkit
from hvdkit.launch.starters.mpi import find_mpirun
from hvdkit.transports.candidates import is_installed, succeeds

_HAS_NCCL = "import sys, torch; sys.exit(not (torch.distributed.is_nccl_available() and torch.cuda.is_available()))"
_PACKAGES = {"PyTorch": "torch", "TensorFlow": "tensorflow", "mpi4py": "mpi4py", "NumPy": "numpy"}


def version_of(module: str) -> str:
    """The installed version, or a word that says there is none."""
    if not is_installed(module):
        return "not installed"
    for distribution in importlib.metadata.packages_distributions().get(module, [module]):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:  # a folder of that name, of no distribution
            break
    return "unknown version"


def kernels_backend() -> str:
    """``native`` or ``numpy``."""
    return str(importlib.import_module("hvdkit.kernels").backend())


def _rows(title: str, rows: Iterable[tuple[bool, str]]) -> list[str]:
    return ["", f"{title}:", *(f"    [{'X' if there else ' '}] {name}" for there, name in rows)]


def report() -> str:
    """The table, in the manner of ``horovodrun --check-build``."""
    torch = is_installed("torch")
    mpirun = find_mpirun()
    native = kernels_backend() == "native"
    versions = [f"{name} {version_of(module)}" for name, module in _PACKAGES.items()]
    return "\n".join(
        [
            f"hvdkit v{hvdkit.__version__}, Python {platform.python_version()}, {', '.join(versions)}",
            *_rows(
                "Available Frameworks",
                [
                    (torch, "PyTorch"),
                    (is_installed("tensorflow"), "TensorFlow"),
                ],
            ),
            *_rows(
                "Available Controllers",
                [(mpirun.path is not None, f"MPI ({mpirun.path or mpirun.reason})"), (torch, "Gloo")],
            ),
            *_rows(
                "Available Tensor Operations",
                [(is_installed("mpi4py"), "MPI"), (torch, "Gloo"), (torch and succeeds(_HAS_NCCL), "NCCL")],
            ),
            *_rows("Kernels", [(native, "native (C++)"), (not native, "numpy")]),
        ]
    )
