"""Bringing ranks to the same state: variables and objects of one rank for all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hvdkit.api import objects
from hvdkit.engine.life.process_sets import ProcessSet, global_process_set
from hvdkit.tensorflow.ops.broadcast import broadcast_
from hvdkit.tensorflow.ops.exceptions import raised_as_tensorflows
from hvdkit.tensorflow.ops.unconverted import as_written


@as_written
def broadcast_variables(
    variables: Sequence[Any], root_rank: int, process_set: ProcessSet = global_process_set, inplace: bool = False
) -> None:
    """Write the values of ``root_rank`` into variables on all ranks, which have the same ones in the same order.

    ``variables``: tf.Variable or Keras variables. ``inplace`` changes nothing: they are always assigned to. Raises
    TypeError for what cannot be assigned to, ValueError for variables that a layer has not made yet,
    HorovodInternalError on every rank where ranks disagree.
    """
    variables = list(variables)  # an iterator gives them once
    for index, variable in enumerate(variables):
        if getattr(variable, "shape", None) is None:
            raise ValueError(
                f"broadcast_variables: variables[{index}] has no value yet\n"
                "HINT: build the model first, by model.build(), by a batch, or by optimizer.build(variables)."
            )
    broadcast_(variables, root_rank, None, process_set)


def broadcast_global_variables(root_rank: int) -> None:
    """Of TensorFlow 1. Raises RuntimeError, as Horovod does in eager execution."""
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
    """Give all ranks of ``process_set`` the object of ``root_rank``; what the others pass is ignored.

    ``session`` is of TensorFlow 1 and not used. See hvdkit.api.objects for errors.
    """
    with raised_as_tensorflows():
        return objects.broadcast_object(obj, root_rank, name, process_set)


def broadcast_object_fn(
    root_rank: int = 0, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Callable[[Any], Any]:
    """A function that does what broadcast_object() does."""
    return lambda obj: broadcast_object(obj, root_rank, session, name, process_set)


def allgather_object(
    obj: Any, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """The objects of all ranks of ``process_set``, in rank order. ``session`` is of TensorFlow 1 and not used."""
    with raised_as_tensorflows():
        return objects.allgather_object(obj, name, process_set)
