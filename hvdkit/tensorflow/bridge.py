"""From TensorFlow to the engine and back: at once in eager execution, in a graph by a pair of operations.

In a graph the first operation hands arrays to the engine and returns at once, the second one waits. The first ones run
in the order in which they were created, on every rank the same, so that what a rank waits for has been handed over, or
will be, on all others: each has the one before it as a control dependency, and writes a variable, which brings calls of
functions, branches and loops that hold such operations into the same order.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import numpy as np
import tensorflow as tf

from hvdkit.api.handles import HANDLES
from hvdkit.errors import HorovodInternalError
from hvdkit.tensorflow.arrays import Array, as_array, as_tensor
from hvdkit.tensorflow.exceptions import mark

Output = tuple[Any, Any]  # dtype, static shape

_last_begins: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # by graph


class Start(Protocol):
    """Hands arrays to the engine; returns its handle and what turns its result into arrays."""

    def __call__(self, arrays: list[Array], name: str | None, wake: bool) -> tuple[Any, Callable[[Any], list[Array]]]:
        """``wake`` is False where the caller waits at once, and then drives the engine itself."""


def operation_name(kind: str, name: str | None, tensors: Sequence[Any], ignore_name_scope: bool) -> str | None:
    """As Horovod names operations. In a graph it is made of the tensors' names, and told apart from others' there."""
    if tf.executing_eagerly():
        return name
    graph = tf.compat.v1.get_default_graph()
    if name is None:
        ends = [tensors[0], tensors[-1]] if len(tensors) > 1 else [tensors[0]]
        name = re.sub("[^a-zA-Z0-9_]", "_", "_".join([f"Horovod{kind}", *map(_name_of, ends)]))
    if ignore_name_scope:
        with graph.name_scope(None):
            return str(graph.unique_name(name))
    return str(graph.unique_name(name))


def gradient_name(name: str | None) -> str | None:
    """The name under which the gradient of the operation ``name`` travels."""
    return None if name is None else f"{name}.gradient"


def _name_of(tensor: Any) -> str:
    """A tensor's name in its graph; what is captured from outside has a number for one, which each rank counts."""
    return "captured" if re.fullmatch(r"\d+(:\d+)?", tensor.name) else str(tensor.name)


def run(tensors: Sequence[Any], name: str | None, start: Start, outputs: Sequence[Output]) -> list[Any]:
    """The results of an operation on tensors. ``outputs`` are what is known of them while a graph is built."""
    if tf.executing_eagerly():
        handle, finish = start([as_array(tensor) for tensor in tensors], name, False)
        return [_beside(tensors[0], as_tensor(array)) for array in finish(handle.wait())]
    check_functions()

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def begin(*arrays: Any) -> Any:
        try:
            ready = [np.ascontiguousarray(array).reshape(np.shape(array)) for array in arrays]
            return np.int64(HANDLES.add(*start(ready, name, True)))
        except Exception as error:
            raise mark(error) from None

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def end(number: Any) -> list[Array]:
        try:
            results: list[Array] | None = HANDLES.synchronize(int(number))
            if results is None:
                raise HorovodInternalError(f"{name!r}: hvd.shutdown() was called while it was in flight.")
        except Exception as error:
            raise mark(error) from None
        return results

    number = in_order(lambda: tf.numpy_function(begin, list(tensors), tf.int64, name="hvdkit_begin"))
    results = tf.numpy_function(end, [number], [dtype for dtype, _ in outputs], name="hvdkit_end")
    _leave_order(results[0].op)
    for result, (_, shape) in zip(results, outputs, strict=True):
        result.set_shape(shape)
    return list(results)


def is_recorded() -> bool:
    """Whether somebody may ask for gradients of what is done now: in a graph always, eagerly while a tape records."""
    if not tf.executing_eagerly():
        return True
    try:
        from tensorflow.python.eager import record
    except ImportError:  # another layout of TensorFlow: slower, and as right
        return True
    return bool(record.could_possibly_record())


def in_order(make: Callable[[], Any]) -> Any:
    """What ``make`` makes, one operation's output or outputs, to run after all that was made so before.

    In this graph, and in those that call it.
    """
    graph = tf.compat.v1.get_default_graph()
    before = _last_begins.get(graph)
    with tf.control_dependencies([] if before is None else [before]):
        turn = _order().assign_add(1, read_value=False)
    with tf.control_dependencies([turn]):
        made = make()
    _last_begins[graph] = (made[0] if isinstance(made, list | tuple) else made).op
    return made


@functools.lru_cache(maxsize=1)
def _order() -> Any:
    """The variable that stands for the order of operations: whoever writes it takes part."""
    with tf.init_scope(), tf.device("CPU:0"):
        return tf.Variable(0, dtype=tf.int64, trainable=False, name="hvdkit_order")


def _leave_order(operation: Any) -> None:
    """Let what waits run whenever it can, as long as it does: else TensorFlow would run it before the next begins."""
    manager = getattr(tf.compat.v1.get_default_graph(), "experimental_acd_manager", None)
    if manager is not None:
        manager.run_independently(operation)


def check_functions() -> None:
    """Raises NotImplementedError in graphs of TensorFlow 1."""
    if not tf.compat.v1.executing_eagerly_outside_functions():
        raise NotImplementedError(
            "hvd's operations need eager execution or tf.function, not graphs and sessions of TensorFlow 1.\n"
            "HINT: remove tf.compat.v1.disable_v2_behavior() and disable_eager_execution()."
        )


def backward(outputs: Sequence[Any], gradients: Sequence[Any], reduce: Callable[[list[Any]], list[Any]]) -> list[Any]:
    """The gradients of an operation's inputs: ``reduce`` of those of its floating ``outputs``, None for the others.

    A missing gradient is zeros: other ranks may have one.
    """
    places = [place for place, output in enumerate(outputs) if output.dtype.is_floating]
    known = [
        tf.zeros_like(outputs[place]) if gradients[place] is None else tf.convert_to_tensor(gradients[place])
        for place in places
    ]
    found: list[Any] = [None] * len(outputs)
    for place, gradient in zip(places, reduce(known) if known else [], strict=True):
        found[place] = gradient
    return found


def _beside(tensor: Any, result: Any) -> Any:
    """A result on the device of the tensor that it was made from."""
    if tensor.device.endswith("CPU:0"):
        return result
    with tf.device(tensor.device):
        return tf.identity(result)
