"""Bringing ranks to the same state: variables and objects of one rank for all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hvdkit.api import checks, objects
from hvdkit.engine.session.process_sets import ProcessSet, global_process_set
from hvdkit.tensorflow.ops.broadcast import broadcast_
from hvdkit.tensorflow.ops.exceptions import raised_as_tensorflows
from hvdkit.tensorflow.ops.unconverted import as_written


@as_written
def broadcast_variables(
    variables: Sequence[Any], root_rank: int, process_set: ProcessSet = global_process_set, inplace: bool = False
) -> None:
    """Write the values of ``root_rank`` into variables on all ranks, which have the same ones in the same order.

    Args:
        variables: tf.Variable or Keras variables, each of the same shape and dtype on all ranks.
        root_rank: whose values all get.
        process_set: the ranks that take part.
        inplace: changes nothing; variables are always assigned to.

    Raises:
        TypeError: for what cannot be assigned to.
        ValueError: for variables that a layer has not made yet.
        HorovodInternalError: on every rank where ranks disagree.

    Examples:
        >>> _ = model.layers[0].bias.assign([float(hvd.rank())])
        >>> hvd.broadcast_variables(model.variables, root_rank=1)
        >>> model.layers[0].bias.numpy().tolist()
        [1.0]
    """
    broadcast_(checks.check_variables("broadcast_variables", variables), root_rank, None, process_set)


def broadcast_global_variables(root_rank: int) -> None:
    """Of TensorFlow 1, whose global variables TensorFlow 2 does not have.

    Args:
        root_rank: not used.

    Raises:
        RuntimeError: always, as Horovod does in eager execution; ``broadcast_variables`` takes variables.

    Examples:
        >>> hvd.broadcast_global_variables(0)
        Traceback (most recent call last):
        RuntimeError: hvd.broadcast_global_variables() does not support eager execution. Please use ...
    """
    raise RuntimeError(
        "hvd.broadcast_global_variables() does not support eager execution. "
        "Please use `hvd.broadcast_variables(<model/optimizer variables>)` instead."
    )


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Give all ranks of ``process_set`` the object of ``root_rank``.

    Args:
        obj: on the root, what cloudpickle can pickle; what the others pass is ignored.
        root_rank: counts among all ranks.
        session: of TensorFlow 1, and not used.
        name: tells concurrent calls of several threads apart.
        process_set: the ranks that take part.

    Returns:
        ``obj`` itself on the root, a copy elsewhere.

    Raises:
        Exception: on the root, what pickling raised.
        HorovodInternalError: on the others where pickling failed, and on all if a rank is lost.
        TypeError, ValueError: for arguments that make no sense.

    Examples:
        >>> hvd.broadcast_object({"epoch": 3} if hvd.rank() == 0 else None, root_rank=0)
        {'epoch': 3}
    """
    with raised_as_tensorflows():
        return objects.broadcast_object(obj, root_rank, name, process_set)


def broadcast_object_fn(
    root_rank: int = 0, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Callable[[Any], Any]:
    """A function that does what broadcast_object() does. Arguments and errors are those of broadcast_object().

    Returns:
        A function of one argument, the object, which returns the root's.

    Examples:
        >>> agreed = hvd.broadcast_object_fn(root_rank=1)
        >>> agreed(hvd.rank())
        1
    """
    return lambda obj: broadcast_object(obj, root_rank, session, name, process_set)


def allgather_object(
    obj: Any, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Collect the objects of all ranks of ``process_set``. The other arguments are those of broadcast_object().

    Args:
        obj: what cloudpickle can pickle; of any kind and size on each rank.

    Returns:
        A list with the objects, in rank order.

    Raises:
        Exception: what pickling raised, where it did.
        HorovodInternalError: on the others where pickling failed, and on all if a rank is lost.

    Examples:
        >>> hvd.allgather_object({"rank": hvd.rank()})
        [{'rank': 0}, {'rank': 1}]
    """
    with raised_as_tensorflows():
        return objects.allgather_object(obj, name, process_set)
