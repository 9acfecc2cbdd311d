"""From TensorFlow to the engine and back: at once in eager execution, in a graph by a pair of operations.

In a graph the first operation hands arrays to the engine and returns at once, the second one waits. The first ones run
in the order in which they were created, on every rank the same, so that what a rank waits for has been handed over, or
will be, on all others: each has the one before it as a control dependency, and a variable is written before and after
it, which brings calls of functions, branches and loops that hold such operations into the same order.

AutoGraph translates the Python that a ``tf.function`` reaches. It leaves our functions as they are written
(``tensorflow/ops/unconverted``), which need none of that: translated, an operation or an optimizer's step took one to
three seconds of CPU in each process the first time.

An eager operation takes the tensors' own memory as arrays and hands results on by DLPack, without a copy where memory
is aligned to 64 bytes (TensorFlow's kernels abort the process where it is not). In a graph it is a pair of
``tf.numpy_function``s: one hands the arrays to the engine and returns, one waits. All that hand over run in the order
in which they were created, which must be the same on all ranks: each is a control dependency of the next one, and a
variable is written before and after it, since TensorFlow orders calls of functions, branches and loops by the variables
that they write. What waits blocks a thread of the executor, but is in nobody's way: what it waits for has been handed
over on every rank that waits for something later. Threads that run several functions with hvd's operations at once need
more threads of ``inter_op_parallelism_threads`` than there are such functions. Names are made as Horovod makes them and
told apart by the graph. An exception in there would reach users as text in an exception of TensorFlow's: it is marked
with a number, and the function that runs graphs raises the original (``exceptions``), made one that is also the
exception of TensorFlow's that Horovod raised. With MPI there is no PyTorch in the process.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import tensorflow as tf

from hvdkit.api.operations import HANDLES, Invocation
from hvdkit.errors import HorovodInternalError
from hvdkit.tensorflow.ops.device import Device, device_for
from hvdkit.tensorflow.ops.exceptions import in_graph, raised_as_tensorflows
from hvdkit.tensorflow.ops.unconverted import as_written

Output = tuple[Any, Any]  # dtype, static shape

# By graph: the last operation that was put in order, and how many operations the graph had by then.
_last_begins: WeakKeyDictionary[Any, tuple[Any, int]] = WeakKeyDictionary()


def run(
    asked: Invocation,
    tensors: Sequence[Any],
    start: Callable[[Invocation, Sequence[Any]], int],
    outputs: Sequence[Output],
    stays_on_device: Callable[[], bool] = lambda: False,
    named_after: Sequence[Any] | None = None,
) -> list[Any]:
    """The results of an operation on tensors. ``outputs`` are what is known of them while a graph is built.

    ``asked`` is that of a caller who waits; ``start`` hands eager tensors, or a graph's arrays, to the engine and
    returns the operation's number.
    ``stays_on_device``: whether it can be done without host memory, if the job has a device.
    ``named_after``: the tensors of which a graph makes a name, where some of ``tensors`` are not there on all ranks.
    """
    if not tf.executing_eagerly():
        name = _name_in_graph(asked, tensors if named_after is None else named_after)
        return _run_in_graph(asked._replace(name=name, waits=False), tensors, start, outputs, stays_on_device())
    with raised_as_tensorflows():
        return _results_of(start(asked, tensors), asked)


def _results_of(number: int, asked: Invocation) -> list[Any]:
    """Wait for an operation. Raises HorovodInternalError where another thread has called shutdown() meanwhile."""
    results = HANDLES.synchronize(number)
    if results is None:
        what = asked.function if asked.name is None else asked.name
        raise HorovodInternalError(f"{what!r}: hvd.shutdown() was called while it was in flight.")
    return list(results)


def _name_in_graph(asked: Invocation, tensors: Sequence[Any]) -> str:
    """As Horovod names operations: made of the tensors' names if it has none, and told apart from others' there."""
    graph = tf.compat.v1.get_default_graph()
    name = asked.name
    if name is None:
        kind = "".join(word.capitalize() for word in asked.function.split("_"))
        ends = [tensors[0], tensors[-1]] if len(tensors) > 1 else [tensors[0]]
        name = re.sub("[^a-zA-Z0-9_]", "_", "_".join([f"Horovod{kind}", *map(_name_of, ends)]))
    if asked.ignore_name_scope:
        with graph.name_scope(None):
            return str(graph.unique_name(name))
    return str(graph.unique_name(name))


def _name_of(tensor: Any) -> str:
    """A tensor's name in its graph; what is captured from outside has a number for one, which each rank counts."""
    return "captured" if re.fullmatch(r"\d+(:\d+)?", tensor.name) else str(tensor.name)


@as_written
def _run_in_graph(
    asked: Invocation,
    tensors: Sequence[Any],
    start: Callable[[Invocation, Sequence[Any]], int],
    outputs: Sequence[Output],
    stays_on_device: bool,
) -> list[Any]:
    check_functions()
    begin = in_graph(lambda *inputs: np.int64(start(asked, inputs)))
    end = in_graph(lambda number: _results_of(int(number), asked))
    device = device_for(tensors) if stays_on_device else None
    number = in_order(lambda: call(device, begin, tensors, tf.int64, "hvdkit_begin"))
    results = call(device, end, [number], [dtype for dtype, _ in outputs], "hvdkit_end")
    _leave_order(results[0].op)
    for result, (_, shape) in zip(results, outputs, strict=True):
        result.set_shape(shape)
    return list(results)


def call(device: Device | None, function: Any, inputs: Sequence[Any], dtypes: Any, name: str) -> Any:
    """An operation of the present graph that calls ``function`` with eager tensors of a device, or with arrays."""
    if device is None:
        return tf.numpy_function(function, list(inputs), dtypes, name=name)
    with tf.device(device.name):
        return tf.py_function(function, list(inputs), dtypes, name=name)


def differentiable(
    tensors: Sequence[Any],
    operate: Callable[[Sequence[Any]], list[Any]],
    reduce: Callable[[Sequence[Any], list[Any]], list[Any]],
) -> list[Any]:
    """What ``operate`` makes of the tensors, with gradients if somebody may ask for them.

    ``reduce`` makes those of the tensors that have gradients, of these tensors and of the gradients of what was made of
    them.
    """
    if not _is_recorded():
        return operate(tensors)

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def recorded(*inputs: Any) -> tuple[list[Any], Callable[..., Any]]:
        outputs = operate(inputs)

        def gradient(*gradients: Any) -> list[Any]:
            return backward(outputs, gradients, lambda known: reduce(inputs, known))

        return outputs, gradient

    return list(recorded(*tensors))


def _is_recorded() -> bool:
    """Whether somebody may ask for gradients of what is done now: in a graph always, eagerly while a tape records."""
    if not tf.executing_eagerly():
        return True
    try:
        from tensorflow.python.eager import record
    except ImportError:  # another layout of TensorFlow: slower, and as right
        return True
    return bool(record.could_possibly_record())


def in_order(make: Callable[[], Any], first: bool = True, last: bool = True) -> Any:
    """What ``make`` makes, one operation's output or outputs, to run after all that was made so before.

    In this graph, and in those that call it: calls of functions, branches and loops before and after it are ordered by
    the variable that is written before and after. ``first`` and ``last`` are False where several are made one after the
    other and nothing else in between, which saves a few microseconds.

    The graph has its data by then: at the end of the data nothing is begun.
    """
    graph = tf.compat.v1.get_default_graph()
    before, seen = _last_begins.get(graph, (None, 0))
    data, seen = _data_of(graph, seen), len(graph.get_operations())
    with tf.control_dependencies(data if before is None else [before, *data]):
        turn = [_order().assign_add(1, read_value=False)] if first else []
        with tf.control_dependencies(turn):
            made = make()
    operation = (made[0] if isinstance(made, list | tuple) else made).op
    if last:
        with tf.control_dependencies([operation]):
            operation = _order().assign_add(1, read_value=False)
    _last_begins[graph] = (operation, seen)
    return made


@contextmanager
def after(tensors: Sequence[Any]) -> Iterator[None]:
    """Order what a graph gets in this context after ``tensors`` (None is left out) and after the graph's data.

    TensorFlow runs what does not depend on a batch also where there is none: Keras's ``fit`` finds the end of data of
    unknown cardinality by running its train function once more. In eager execution this is the order anyway.
    """
    if tf.executing_eagerly():
        yield
        return
    data = _data_of(tf.compat.v1.get_default_graph())
    with tf.control_dependencies([*data, *(tensor for tensor in tensors if tensor is not None)]):
        there = tf.no_op(name="hvdkit_there")
    with tf.control_dependencies([there]):
        yield


def _data_of(graph: Any, seen: int = 0) -> list[Any]:
    """Return what gives a graph its data: its arguments, and the operations that take from an iterator.

    ``seen``: how many operations the graph had when it was asked before; only those after them are looked at.
    """
    inputs = () if seen else getattr(graph, "inputs", ())  # TensorFlow 1's graphs have none
    arguments = [one for one in inputs if one.dtype not in (tf.resource, tf.variant)]
    taken = [one for one in graph.get_operations()[seen:] if one.type.startswith("IteratorGetNext")]
    return [*arguments, *taken]


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


def has_gradient(tensor: Any) -> bool:
    """True if the dtype of a tensor is one that TensorFlow differentiates."""
    return bool(tensor.dtype.is_floating or tensor.dtype.is_complex)


def backward(outputs: Sequence[Any], gradients: Sequence[Any], reduce: Callable[[list[Any]], list[Any]]) -> list[Any]:
    """The gradients of an operation's inputs: ``reduce`` of those of ``outputs`` that have some, None for the others.

    A missing gradient is zeros: other ranks may have one.
    """
    indices = [index for index, output in enumerate(outputs) if has_gradient(output)]
    known = [
        tf.zeros_like(outputs[index]) if gradients[index] is None else tf.convert_to_tensor(gradients[index])
        for index in indices
    ]
    found: list[Any] = [None] * len(outputs)
    for index, gradient in zip(indices, reduce(known) if known else [], strict=True):
        found[index] = gradient
    return found
