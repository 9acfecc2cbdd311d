"""Start and stop, who am I among how many, and what this installation can do, whatever the framework."""

from __future__ import annotations

import functools
import importlib
import os
import sys
from typing import Any

from hvdkit.api.handles import HANDLES
from hvdkit.api.imports import after_import
from hvdkit.api.init_arguments import check_comm, check_process_sets
from hvdkit.engine.life import runtime
from hvdkit.engine.telemetry.compression_report import CompressionStatistics
from hvdkit.engine.telemetry.telemetry import CommunicationStatistics
from hvdkit.kernels.reduce_op import ReduceOp
from hvdkit.transports.candidates import is_installed, succeeds

Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Adasum = ReduceOp.ADASUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT


def init(comm: Any = None, process_sets: Any = None, cuda: bool = False, for_torch: bool = False) -> None:
    """What the adapters' ``init`` do.

    ``cuda``: whether tensors of GPUs shall travel by NCCL; ``for_torch``: whether tensors are PyTorch's.
    """
    ranks_or_comm, sets = check_comm(comm), check_process_sets(process_sets, comm)
    if not runtime.is_initialized():
        HANDLES.clear()
    runtime.init(comm=ranks_or_comm, process_sets=sets, cuda=cuda, for_torch=for_torch)
    after_import("keras", _watch_keras)
    after_import("tf_keras", _watch_keras)


def _watch_keras() -> None:
    """Have Keras warn where it trains with gradients that nobody reduces, without a word of ours in the script."""
    # Whoever imports Keras 2 in a job of another framework's shall not import Keras 3 for it.
    is_keras_2 = "tf_keras" in sys.modules and "hvdkit.tensorflow" in sys.modules
    if is_keras_2 or getattr(sys.modules.get("keras"), "__version__", "").startswith("3."):
        importlib.import_module("hvdkit.keras.unwrapped").install()


def shutdown() -> None:
    """Leave the job, after which init() may be called again. Does nothing where init() was not called.

    In a child that was forked from a rank it is the child alone that leaves: the job goes on.
    """
    if not runtime.is_forked():
        HANDLES.clear()
    runtime.shutdown()


def is_initialized() -> bool:
    """True between init() and shutdown(), also in forked children, which can ask for ranks but not communicate."""
    return runtime.is_initialized()


def size() -> int:
    """How many ranks the job has.

    Raises:
        NotInitializedError: a ValueError, as by all functions below: before init() or after shutdown().
    """
    return int(runtime.topology().size)


def rank() -> int:
    """This process's number among all ranks, from 0.

    Raises:
        NotInitializedError: before init() or after shutdown().
    """
    return int(runtime.topology().rank)


def local_size() -> int:
    """How many ranks run on this node.

    Raises:
        NotInitializedError: before init() or after shutdown().
    """
    return int(runtime.topology().local_size)


def local_rank() -> int:
    """This process's number among the ranks of this node, from 0: usually the index of its GPU.

    Raises:
        NotInitializedError: before init() or after shutdown().
    """
    return int(runtime.topology().local_rank)


def cross_size() -> int:
    """How many nodes have a rank of this local rank.

    Raises:
        NotInitializedError: before init() or after shutdown().
    """
    return int(runtime.topology().cross_size)


def cross_rank() -> int:
    """The number of this node among the nodes that have a rank of this local rank.

    Raises:
        NotInitializedError: before init() or after shutdown().
    """
    return int(runtime.topology().cross_rank)


def is_homogeneous() -> bool:
    """True if every node runs the same number of ranks.

    Raises:
        NotInitializedError: before init() or after shutdown().
    """
    return bool(runtime.topology().is_homogeneous)


def compression_stats() -> CompressionStatistics:
    """What compression did on this rank, of which ``str`` has a line for each codec.

    Returns:
        An object whose dicts ``by_codec`` and ``by_parameter`` have ``bytes_before``, ``bytes_after``, ``ratio``,
        ``encode_seconds``, ``decode_seconds`` and ``residual_norm``, the norm of what is kept and not sent.

    Raises:
        NotInitializedError: before init() or after shutdown().

    Examples:
        >>> print(hvd.compression_stats())
        nothing was compressed
    """
    return runtime.engine().compression_statistics()


def communication_stats() -> CommunicationStatistics:
    """What communication cost this rank since init().

    Returns:
        An object with ``bytes_sent``, ``reductions`` (fused ones), ``reduced_bytes``, ``seconds`` that training threads
        waited for communication, and ``busy_seconds`` that reductions took, which overlap.

    Raises:
        NotInitializedError: before init() or after shutdown().

    Examples:
        >>> before = hvd.communication_stats()
        >>> hvd.barrier()
        >>> hvd.communication_stats().seconds >= before.seconds
        True
    """
    return runtime.engine().communication_statistics()


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Begin to record what the engine does into a file, in the format of chrome://tracing; see docs/timeline.md.

    Rank 0 alone records; on other ranks this does nothing.

    Args:
        file_path: where; a file that is there is overwritten.
        mark_cycles: whether to mark the engine's cycles too.

    Raises:
        TypeError: unless ``file_path`` is a string or a path.
        NotInitializedError: before init() or after shutdown().

    Examples:
        >>> hvd.start_timeline("timeline.json")
        >>> hvd.barrier()
        >>> hvd.stop_timeline()
    """
    if not isinstance(file_path, str | os.PathLike):
        raise TypeError(f"start_timeline: file_path must be a string or a path, got {file_path!r}")
    runtime.engine().telemetry.start(os.fspath(file_path), mark_cycles)


def stop_timeline() -> None:
    """End the recording and close its file.

    Raises:
        NotInitializedError: before init() or after shutdown().
    """
    runtime.engine().telemetry.stop()


def mpi_threads_supported() -> bool:
    """Whether MPI lets several threads call it at once, so that other MPI code may run beside this.

    Raises:
        ValueError: where MPI does not carry this job.
        NotInitializedError: before init() or after shutdown().
    """
    runtime.topology()
    if not mpi_enabled():
        raise ValueError("Horovod MPI is not enabled; Please make sure it's installed and enabled.")
    from mpi4py import MPI

    return bool(MPI.Query_thread() == MPI.THREAD_MULTIPLE)


def mpi_enabled() -> bool:
    """Whether MPI carries this job; False before init()."""
    return runtime.carrier() == "mpi"


@functools.lru_cache(maxsize=1)
def mpi_built() -> bool:
    """Whether mpi4py is installed and finds an MPI library. Asks a short-lived process, so MPI is not started here."""
    if not is_installed("mpi4py"):
        return False
    if "mpi4py.MPI" in sys.modules:
        return True
    return succeeds("import mpi4py; mpi4py.rc.initialize = False; import mpi4py.MPI")


def gloo_enabled() -> bool:
    """Whether torch.distributed's Gloo carries this job; False before init()."""
    return runtime.carrier() == "torch"


def ddl_built() -> bool:
    """False: IBM's DDL is not used."""
    return False


def ccl_built() -> bool:
    """False: Intel's oneCCL is not used."""
    return False
