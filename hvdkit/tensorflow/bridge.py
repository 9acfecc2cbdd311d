"""From TensorFlow to the engine and back: at once in eager execution, in a graph by a pair of operations.

In a graph the first operation hands arrays to the engine and returns at once, the second one waits. Both are stateful,
so TensorFlow runs those of a function in the order in which they were created, on every rank the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from hvdkit.api.handles import HANDLES
from hvdkit.tensorflow.arrays import Array, as_array, as_tensor
from hvdkit.tensorflow.exceptions import mark

Output = tuple[Any, Any]  # dtype, static shape


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
        ends = (tensors[0].name, tensors[-1].name) if len(tensors) > 1 else (tensors[0].name,)
        name = re.sub("[^a-zA-Z0-9_]", "_", "_".join([f"Horovod{kind}", *ends]))
    if ignore_name_scope:
        with graph.name_scope(None):
            return str(graph.unique_name(name))
    return str(graph.unique_name(name))


def run(tensors: Sequence[Any], name: str | None, start: Start, outputs: Sequence[Output]) -> list[Any]:
    """The results of an operation on tensors. ``outputs`` are what is known of them while a graph is built."""
    if tf.executing_eagerly():
        handle, finish = start([as_array(tensor) for tensor in tensors], name, False)
        return [_beside(tensors[0], as_tensor(array)) for array in finish(handle.wait())]

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
            results: list[Array] = HANDLES.synchronize(int(number))
        except Exception as error:
            raise mark(error) from None
        return results

    number = tf.numpy_function(begin, list(tensors), tf.int64, name="hvdkit_begin")
    results = tf.numpy_function(end, [number], [dtype for dtype, _ in outputs], name="hvdkit_end")
    for result, (_, shape) in zip(results, outputs, strict=True):
        result.set_shape(shape)
    return list(results)


def _beside(tensor: Any, result: Any) -> Any:
    """A result on the device of the tensor that it was made from."""
    if tensor.device.endswith("CPU:0"):
        return result
    with tf.device(tensor.device):
        return tf.identity(result)
