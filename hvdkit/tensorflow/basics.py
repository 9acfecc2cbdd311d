"""The start of a job, its ranks as operations that count when a graph runs, join, barrier, and TensorFlow's parts."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from hvdkit.api import checks, job
from hvdkit.engine.session import runtime
from hvdkit.engine.session.process_sets import ProcessSet, global_process_set
from hvdkit.tensorflow.ops.bridge import as_written, ordered_node, scalar
from hvdkit.tensorflow.ops.exceptions import raised_as_tensorflows
from hvdkit.transports import is_installed


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Join the job that a launcher started; without a launcher, a job of one rank. A second call does nothing.

    Arguments and errors are those of hvdkit.torch.init().

    Examples:
        >>> hvd.init()
        >>> hvd.size()
        2
    """
    job.init(comm, process_sets)


def gloo_built() -> bool:
    """Return whether PyTorch, whose Gloo carries jobs without MPI, is installed."""
    return is_installed("torch")


def nccl_built() -> int:
    """Return the version of PyTorch's NCCL as one number (22703 for 2.27.3), or 0 without it."""
    if not gloo_built():
        return 0
    from hvdkit.transports.gpu.nccl import nccl_version

    return nccl_version()


def cuda_built() -> bool:
    """Return whether this TensorFlow was built for CUDA, so that tensors of GPUs can be passed."""
    return bool(tf.test.is_built_with_cuda())


def rocm_built() -> bool:
    """Return whether this TensorFlow was built for ROCm."""
    return bool(tf.test.is_built_with_rocm())


def gpu_available(ext_base_name: str = "tensorflow", verbose: bool = False) -> bool:
    """Return whether TensorFlow finds a GPU, also before init().

    Returns True if there is a GPU, and raises nothing. ``ext_base_name`` and ``verbose`` are Horovod's and not used.

    Examples:
        >>> device = "GPU:0" if hvd.gpu_available() else "CPU:0"
        >>> device
        'CPU:0'
    """
    return bool(tf.config.list_physical_devices("GPU"))


@as_written
def size_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """Return the number of ranks that a process set has when the graph runs. Errors are those of rank_op().

    Returns an int32 scalar, of shape (). Raises ValueError when it runs where there is no set of this number.

    Args:
        process_set_id: of the set; 0 is that of all ranks.
        name: of the operation in the graph.

    Examples:
        >>> hvd.size_op().numpy().item()
        2
    """

    def count() -> int:
        sets = runtime.process_sets()
        if process_set_id not in sets:
            ids = ", ".join(map(str, sorted(sets)))
            raise ValueError(f"size_op: process_set_id must be the id of a process set ({ids}), got {process_set_id}")
        return len(sets[process_set_id])

    return scalar(count, name)


@as_written
def local_size_op(name: str | None = None) -> Any:
    """Return the number of ranks on this node when the graph runs. Arguments and errors are those of rank_op().

    Returns an int32 scalar, of shape (). The example is that of size_op().
    """
    return scalar(job.local_size, name)


@as_written
def rank_op(name: str | None = None) -> Any:
    """Return this process's number among all ranks when the graph runs. ``name``: of the operation in the graph.

    Returns an int32 scalar, of shape (). Raises NotInitializedError when it runs before init() or after shutdown().

    Examples:
        >>> hvd.rank_op().numpy().item() == hvd.rank()
        True
    """
    return scalar(job.rank, name)


@as_written
def local_rank_op(name: str | None = None) -> Any:
    """Return this process's number among the ranks of its node. Arguments and errors are those of rank_op().

    Returns an int32 scalar, of shape (). The example is that of rank_op().
    """
    return scalar(job.local_rank, name)


@as_written
def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """Return 1 if this rank is in a process set when the graph runs. Arguments are those of size_op().

    Returns an int32 scalar, of shape (): 0 if this rank is not in the set, -1 before init(), and -2 where there is no
    such set. It raises nothing.

    Examples:
        >>> hvd.process_set_included_op().numpy().item()
        1
    """

    def included() -> int:
        if not runtime.is_initialized():
            return -1
        ranks = runtime.process_sets().get(process_set_id)
        return -2 if ranks is None else int(runtime.topology().rank in ranks)

    return scalar(included, name)


@as_written
def join() -> Any:
    """Say that this rank has no more data, and block until all ranks have said so.

    Until then this rank takes part in the others' allreduces with zeros; other operations fail. It does not have what
    the others trained meanwhile: broadcast parameters and the optimizer's state from the rank that joined last.

    Returns the rank that joined last, as an int32 scalar. Raises HorovodInternalError on every rank, for another
    operation than an allreduce while some have joined, or if a rank is lost.

    Examples:
        >>> for batch in range(2 + hvd.rank()):  # rank 1 has one more
        ...     total = hvd.allreduce(tf.ones(1), name="loss", op=hvd.Sum)
        >>> hvd.join().numpy().item()
        1
        >>> total.numpy().tolist()  # on rank 1, whose last batch met zeros: [1.0]
        [2.0]
    """

    def wait() -> Any:
        return np.int32(runtime.engine().join().wait())

    if tf.executing_eagerly():
        return scalar(wait)
    last = ordered_node(wait, [], tf.int32, "hvdkit_join")
    last.set_shape([])
    return last


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Block until all ranks of ``process_set`` have come here.

    Raises ValueError on a rank that is not in the set, TypeError for what is no ProcessSet, HorovodInternalError if a
    rank is lost.

    Examples:
        >>> if hvd.rank() == 0:
        ...     model.save("model.keras")
        >>> hvd.barrier()
        >>> again = keras.models.load_model("model.keras")  # which is there now, on all ranks
    """
    engine = runtime.engine()
    process_set_id = checks.check_process_set("barrier", process_set)
    with raised_as_tensorflows():
        engine.named.barrier(process_set_id).wait()
