"""Start and end of a job, this process's place among the ranks, and the abilities of this installation."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import os
import sys
from collections.abc import Iterable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

from hvdkit.api.operations import HANDLES
from hvdkit.engine.session import runtime
from hvdkit.engine.session.communicators import is_communicator
from hvdkit.engine.session.process_sets import ProcessSet
from hvdkit.engine.telemetry.compression_report import CompressionStatistics
from hvdkit.engine.telemetry.telemetry import CommunicationStatistics
from hvdkit.errors import EnvironmentConflictError, TransportUnavailableError
from hvdkit.kernels.reduce_op import ReduceOp
from hvdkit.transports import is_installed, succeeds

logger = logging.getLogger("hvdkit")

Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Adasum = ReduceOp.ADASUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT


def init(comm: Any = None, process_sets: Any = None, cuda: bool = False, for_torch: bool = False) -> None:
    """Join the job, for an adapter. Wrong arguments raise an error before any rank waits for another.

    ``cuda``: tensors of GPUs travel by NCCL; ``for_torch``: tensors are PyTorch's. Errors of the user's set-up come
    without a traceback of hvdkit's inside.
    """
    ranks_or_comm, sets = _check_comm(comm), _check_process_sets(process_sets, comm)
    if not runtime.is_initialized():
        HANDLES.clear()
    try:
        runtime.init(comm=ranks_or_comm, process_sets=sets, cuda=cuda, for_torch=for_torch)
    except (EnvironmentConflictError, TransportUnavailableError) as error:
        logger.debug("hvd.init() failed", exc_info=error)
        raise error.with_traceback(None) from None
    _watch_keras()
    if not any(isinstance(finder, _KerasFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _KerasFinder())


def _check_comm(comm: Any) -> Any:
    """Return None, a communicator, or a list of ranks. Raises ValueError for anything else."""
    if comm is None or is_communicator(comm):
        return comm
    ranks = list(comm) if isinstance(comm, Iterable) and not isinstance(comm, str | bytes) else None
    if ranks is None or any(isinstance(rank, bool) or not hasattr(rank, "__index__") for rank in ranks):
        expected = "Expected list of rank integers or mpi4py.MPI.Comm object."
        raise ValueError(f"Invalid type of argument comm. {expected}\ninit: comm: got {comm!r}")
    return [int(rank.__index__()) for rank in ranks]


def _check_process_sets(process_sets: Any, comm: Any) -> list[ProcessSet] | str | None:
    """Return None, "dynamic" in small letters, or a list of ProcessSet. Raises TypeError or ValueError for others.

    Raises NotImplementedError, as Horovod, for sets made from a communicator where ``comm`` is a list of ranks.
    """
    if process_sets is None:
        return None
    expected = 'init: process_sets must be None, "dynamic" or a list of hvd.ProcessSet'
    if isinstance(process_sets, str) and process_sets.lower() == "dynamic":
        return "dynamic"
    if isinstance(process_sets, str) or not isinstance(process_sets, Iterable):
        kind = ValueError if isinstance(process_sets, str) else TypeError
        raise kind(f"{expected}, got {process_sets!r}")
    sets = list(process_sets)
    for index, process_set in enumerate(sets):
        if not isinstance(process_set, ProcessSet):
            raise TypeError(f"{expected}, got {process_set!r} at index {index}")
        if comm and not is_communicator(comm) and process_set.ranks is None:
            raise NotImplementedError(
                "At this time process sets defined via MPI communicators are only supported when calling hvd.init() "
                f"with comm set to a global MPI communicator.\ninit: got comm={comm!r} and {process_set}"
            )
    return sets


def _watch_keras() -> None:
    """Have Keras, if it is imported, warn if it trains with gradients that nothing reduces."""
    # In a job of another framework, the import of Keras 2 must not import Keras 3.
    is_keras_2 = "tf_keras" in sys.modules and "hvdkit.tensorflow" in sys.modules
    if is_keras_2 or getattr(sys.modules.get("keras"), "__version__", "").startswith("3."):
        importlib.import_module("hvdkit.keras.unwrapped").install()


class _KerasFinder(MetaPathFinder):
    """A finder that calls ``_watch_keras`` after imports of Keras, which other finders locate."""

    def __init__(self) -> None:
        self._awaited = {"keras", "tf_keras"} - sys.modules.keys()

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname not in self._awaited:
            return None
        self._awaited.remove(fullname)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_watch(module: Any) -> None:
            execute(module)
            _watch_keras()

        spec.loader.exec_module = execute_and_watch  # type: ignore[method-assign]
        return spec


def shutdown() -> None:
    """Leave the job, after which init() may be called again; a forked child leaves alone. No-op before init()."""
    if not runtime.is_forked():
        HANDLES.clear()
    runtime.shutdown()


def is_initialized() -> bool:
    """True between init() and shutdown(), also in forked children, which can ask for ranks but not communicate."""
    return runtime.is_initialized()


def size() -> int:
    """Return the number of ranks. Raises NotInitializedError, a ValueError, before init() or after shutdown()."""
    return int(runtime.topology().size)


def rank() -> int:
    """Return this process's number among all ranks, from 0. Raises NotInitializedError as ``size`` does."""
    return int(runtime.topology().rank)


def local_size() -> int:
    """Return the number of ranks on this node. Raises NotInitializedError as ``size`` does."""
    return int(runtime.topology().local_size)


def local_rank() -> int:
    """Return this process's number on its node, from 0, as of its GPU. Raises NotInitializedError as ``size`` does."""
    return int(runtime.topology().local_rank)


def cross_size() -> int:
    """Return the number of nodes with a rank of this local rank. Raises NotInitializedError as ``size`` does."""
    return int(runtime.topology().cross_size)


def cross_rank() -> int:
    """Return this node's number among the nodes of ``cross_size``. Raises NotInitializedError as ``size`` does."""
    return int(runtime.topology().cross_rank)


def is_homogeneous() -> bool:
    """True if every node runs the same number of ranks. Raises NotInitializedError as ``size`` does."""
    return bool(runtime.topology().is_homogeneous)


def compression_stats() -> CompressionStatistics:
    """Return figures of compression on this rank; ``str`` of them has a line for each codec.

    Their dicts ``by_codec`` and ``by_parameter`` have ``bytes_before``, ``bytes_after``, ``ratio``, ``encode_seconds``,
    ``decode_seconds`` and ``residual_norm``, of what is kept and not sent. Raises NotInitializedError as ``size`` does.

    Examples:
        >>> print(hvd.compression_stats())
        nothing was compressed
    """
    return runtime.engine().compression_statistics()


def communication_stats() -> CommunicationStatistics:
    """Return the cost of communication for this rank since init(). Raises NotInitializedError as ``size`` does.

    It has ``bytes_sent``, ``reductions`` (after fusion), ``reduced_bytes``, ``seconds`` that training threads waited
    for communication, and ``busy_seconds`` that reductions took, which overlap.

    Examples:
        >>> before = hvd.communication_stats()
        >>> hvd.barrier()
        >>> hvd.communication_stats().seconds >= before.seconds
        True
    """
    return runtime.engine().communication_statistics()


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Have rank 0 record the engine's work in a file, in the format of chrome://tracing; see docs/timeline.md.

    ``file_path`` is overwritten; ``mark_cycles``: mark the engine's cycles too. Raises TypeError unless ``file_path``
    is a string or a path, NotInitializedError as ``size`` does.

    Examples:
        >>> hvd.start_timeline("timeline.json")
        >>> hvd.barrier()
        >>> hvd.stop_timeline()
    """
    if not isinstance(file_path, str | os.PathLike):
        raise TypeError(f"start_timeline: file_path must be a string or a path, got {file_path!r}")
    runtime.engine().telemetry.start(os.fspath(file_path), mark_cycles)


def stop_timeline() -> None:
    """End the recording and close its file. Raises NotInitializedError as ``size`` does."""
    runtime.engine().telemetry.stop()


def mpi_threads_supported() -> bool:
    """True if several threads may call MPI at once. Raises ValueError if MPI carries no job of this process."""
    runtime.topology()
    if not mpi_enabled():
        raise ValueError("Horovod MPI is not enabled; Please make sure it's installed and enabled.")
    from mpi4py import MPI

    return bool(MPI.Query_thread() == MPI.THREAD_MULTIPLE)


def mpi_enabled() -> bool:
    """True if MPI carries this job; False before init()."""
    return runtime.carrier() == "mpi"


@functools.lru_cache(maxsize=1)
def mpi_built() -> bool:
    """True if mpi4py is installed and finds an MPI library. A child process tries it, so MPI does not start here."""
    if not is_installed("mpi4py"):
        return False
    if "mpi4py.MPI" in sys.modules:
        return True
    return succeeds("import mpi4py; mpi4py.rc.initialize = False; import mpi4py.MPI")


def gloo_enabled() -> bool:
    """True if torch.distributed's Gloo carries this job; False before init()."""
    return runtime.carrier() == "torch"


def ddl_built() -> bool:
    """Return False: IBM's DDL is not used."""
    return False


def ccl_built() -> bool:
    """Return False: Intel's oneCCL is not used."""
    return False
