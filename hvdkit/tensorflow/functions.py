"""Variables and objects of one rank for all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hvdkit.api import checks, objects
from hvdkit.engine.session.process_sets import ProcessSet, global_process_set
from hvdkit.tensorflow.ops.bridge import as_written
from hvdkit.tensorflow.ops.exceptions import raised_as_tensorflows
from hvdkit.tensorflow.ops.transfers import broadcast_


@as_written
def broadcast_variables(
    variables: Sequence[Any], root_rank: int, process_set: ProcessSet = global_process_set, inplace: bool = False
) -> None:
    """Write the values of ``root_rank`` into variables on all ranks, which list them in the same order.

    The other arguments and the errors are those of hvdkit.keras.broadcast_variables(). ``inplace`` changes nothing:
    variables, of TensorFlow or Keras, are always assigned to. ``process_set``: the ranks that take part.

    Examples:
        >>> _ = model.layers[0].bias.assign([float(hvd.rank())])
        >>> hvd.broadcast_variables(model.variables, root_rank=1)
        >>> model.layers[0].bias.numpy().tolist()
        [1.0]
    """
    broadcast_(checks.check_variables("broadcast_variables", variables), root_rank, None, process_set)


def broadcast_global_variables(root_rank: int) -> None:
    """Raise RuntimeError, as Horovod does in eager execution: only TensorFlow 1 has a list of global variables.

    ``root_rank`` is not used; ``broadcast_variables`` takes variables.

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
    """Give all ranks of ``process_set`` the object of ``root_rank``. ``session``: of TensorFlow 1, and not used.

    The other arguments and the errors are those of hvdkit.torch.broadcast_object(). Returns ``obj`` itself on the root,
    a copy elsewhere.

    Examples:
        >>> hvd.broadcast_object({"epoch": 3} if hvd.rank() == 0 else None, root_rank=0)
        {'epoch': 3}
    """
    with raised_as_tensorflows():
        return objects.broadcast_object(obj, root_rank, name, process_set)


def broadcast_object_fn(
    root_rank: int = 0, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Callable[[Any], Any]:
    """Return a function of the object that does what broadcast_object() does. Returns the root's object.

    Arguments and errors are those of broadcast_object().

    Examples:
        >>> agreed = hvd.broadcast_object_fn(root_rank=1)
        >>> agreed(hvd.rank())
        1
    """
    return lambda obj: broadcast_object(obj, root_rank, session, name, process_set)


def allgather_object(
    obj: Any, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Collect the objects of all ranks of ``process_set``. ``session``: of TensorFlow 1, and not used.

    The other arguments and the errors are those of hvdkit.torch.allgather_object(). Returns a list with the objects, in
    rank order.

    Examples:
        >>> hvd.allgather_object({"rank": hvd.rank()})
        [{'rank': 0}, {'rank': 1}]
    """
    with raised_as_tensorflows():
        return objects.allgather_object(obj, name, process_set)
