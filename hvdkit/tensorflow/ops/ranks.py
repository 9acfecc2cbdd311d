"""The ranks of a job, counted when a graph runs and not when it is built; join and barrier."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from hvdkit.api import checks, job
from hvdkit.engine.session import runtime
from hvdkit.engine.session.process_sets import ProcessSet, global_process_set
from hvdkit.tensorflow.ops.bridge import as_written, ordered_node
from hvdkit.tensorflow.ops.exceptions import in_graph, raised_as_tensorflows

# Results of process_set_included_op in place of 0 and 1.
NOT_INITIALIZED, UNKNOWN_SET = -1, -2


def _scalar(number: Callable[[], int], name: str | None = None) -> Any:
    """Return ``number()`` as an int32 scalar: of now, or of each run of the graph that is traced."""
    if tf.executing_eagerly():
        with raised_as_tensorflows():
            return tf.constant(number(), tf.int32)
    scalar = tf.numpy_function(in_graph(lambda: np.int32(number())), [], tf.int32, name=name)
    scalar.set_shape([])
    return scalar


@as_written
def size_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """Return the number of ranks that a process set has when the graph runs.

    Args:
        process_set_id: of the set; 0 is that of all ranks.
        name: of the operation in the graph.

    Returns:
        An int32 scalar, of shape ().

    Raises:
        NotInitializedError: when it runs before init() or after shutdown().
        ValueError: when it runs where there is no set of this number.

    Examples:
        >>> hvd.size_op().numpy().item()
        2
    """

    def count() -> int:
        sets = runtime.process_sets()
        if process_set_id not in sets:
            ids = ", ".join(map(str, sorted(sets)))
            raise ValueError(f"size_op: process_set_id must be that of a process set ({ids}), got {process_set_id}")
        return len(sets[process_set_id])

    return _scalar(count, name)


@as_written
def local_size_op(name: str | None = None) -> Any:
    """Return the number of ranks on this node when the graph runs. Arguments and errors are those of rank_op().

    Returns:
        An int32 scalar, of shape ().

    Examples:
        >>> hvd.local_size_op().numpy().item()
        2
    """
    return _scalar(job.local_size, name)


@as_written
def rank_op(name: str | None = None) -> Any:
    """Return this process's number among all ranks when the graph runs.

    Args:
        name: of the operation in the graph.

    Returns:
        An int32 scalar, of shape ().

    Raises:
        NotInitializedError: when it runs before init() or after shutdown().

    Examples:
        >>> hvd.rank_op().numpy().item() == hvd.rank()
        True
    """
    return _scalar(job.rank, name)


@as_written
def local_rank_op(name: str | None = None) -> Any:
    """Return this process's number among the ranks of its node. Arguments and errors are those of rank_op().

    Returns:
        An int32 scalar, of shape ().

    Examples:
        >>> hvd.local_rank_op().numpy().item() == hvd.local_rank()
        True
    """
    return _scalar(job.local_rank, name)


def process_set_rank(process_set: ProcessSet) -> Any:
    """Return this rank's place in a process set when the graph runs, as an int32 scalar."""
    return _scalar(lambda: int(process_set.rank() or 0))


@as_written
def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """Return 1 if this rank is in a process set when the graph runs. Arguments are those of size_op().

    Returns:
        An int32 scalar, of shape (): 1 if this rank is in the set, 0 if not, -1 before init(), and -2 where there is no
        such set. It raises nothing.

    Examples:
        >>> hvd.process_set_included_op().numpy().item()
        1
    """

    def included() -> int:
        if not runtime.is_initialized():
            return NOT_INITIALIZED
        ranks = runtime.process_sets().get(process_set_id)
        return UNKNOWN_SET if ranks is None else int(runtime.topology().rank in ranks)

    return _scalar(included, name)


@as_written
def join() -> Any:
    """Say that this rank has no more data, and block until all ranks have said so.

    Until then this rank takes part in the others' allreduces with zeros; other operations fail. It does not have what
    the others trained meanwhile: broadcast parameters and the optimizer's state from the rank that joined last.

    Returns:
        The rank that joined last, as an int32 scalar.

    Raises:
        HorovodInternalError: on every rank, for another operation than an allreduce while some have joined, or if a
            rank is lost.

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
        return _scalar(wait)
    last = ordered_node(wait, [], tf.int32, "hvdkit_join")
    last.set_shape([])
    return last


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Block until all ranks of ``process_set`` have come here.

    Args:
        process_set: the ranks that wait for each other.

    Raises:
        ValueError: on a rank that is not in the set.
        TypeError: for what is no ProcessSet.
        HorovodInternalError: if a rank is lost.

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
