"""The way of an operation from TensorFlow to the engine: at once in eager execution, by a pair of nodes in a graph.

In a graph, the first ``tf.numpy_function`` hands arrays to the engine and returns, and the second waits. The first
nodes run in the order of their creation, which is the same on all ranks, so that each rank hands over in the end all
that another rank waits for. Control dependencies make this order, and between functions, branches and loops a variable
that is written before and after each first node.

A waiting node blocks a thread of the executor. Where threads run several functions with operations at once,
``inter_op_parallelism_threads`` must be larger than the number of these functions.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import numpy as np
import tensorflow as tf

from hvdkit.api import checks
from hvdkit.api.operations import HANDLES, Invocation
from hvdkit.engine.ops.requests import ReduceRequest
from hvdkit.engine.session import runtime
from hvdkit.errors import HorovodInternalError
from hvdkit.tensorflow.ops.exceptions import in_graph, raised_as_tensorflows
from hvdkit.tensorflow.ops.framework import OPERATIONS

Function = TypeVar("Function", bound=Callable[..., object])
Start = Callable[[Invocation, Sequence[Any]], int]
Output = tuple[Any, Any]

# By graph: the last node that was put in order, and the number of nodes that the graph had by then.
_last_nodes: WeakKeyDictionary[Any, tuple[Any, int]] = WeakKeyDictionary()


def as_written(function: Function) -> Function:
    """Return ``function`` marked so that AutoGraph translates neither it nor the functions that it calls.

    The translation of one operation, or of an optimizer's step, would take each process one to three seconds.
    """
    return cast("Function", tf.autograph.experimental.do_not_convert(function))


def run(
    invocation: Invocation, tensors: Sequence[Any], start: Start, outputs: Sequence[Output], named_after: Any = None
) -> list[Any]:
    """Run an operation on tensors and return its results, of which ``outputs`` has dtypes and static shapes.

    ``start`` hands eager tensors, or a graph's arrays, to the engine and returns the operation's handle. A graph makes
    a name of the tensors ``named_after``, where some ranks lack some of ``tensors``.
    """
    if not tf.executing_eagerly():
        runtime.engine()  # raises NotInitializedError before init
        checks.check_name(invocation.function, invocation.name)
        # A rank need not be a member before the graph runs, since tf.cond may leave the operation out.
        checks.check_registered(invocation.function, invocation.process_set)
        name = _name_in_graph(invocation, tensors if named_after is None else named_after)
        return _run_in_graph(invocation._replace(name=name, waits=False), tensors, start, outputs)
    with raised_as_tensorflows():
        return _wait(start(invocation, tensors), invocation)


@as_written
def _run_in_graph(invocation: Invocation, tensors: Sequence[Any], start: Start, outputs: Sequence[Output]) -> list[Any]:
    handle = ordered_node(lambda *arrays: np.int64(start(invocation, arrays)), tensors, tf.int64, "hvdkit_begin")
    end = in_graph(lambda handle: _wait(int(handle), invocation))
    results = tf.numpy_function(end, [handle], [dtype for dtype, _ in outputs], name="hvdkit_end")
    manager = getattr(tf.compat.v1.get_default_graph(), "experimental_acd_manager", None)
    if manager is not None:  # otherwise TensorFlow would run the waiting node before the next node in order begins
        manager.run_independently(results[0].op)
    for result, (_, shape) in zip(results, outputs, strict=True):
        result.set_shape(shape)
    return list(results)


def _wait(handle: int, invocation: Invocation) -> list[Any]:
    """Return the results. Raise HorovodInternalError where another thread has called shutdown() meanwhile."""
    if (results := HANDLES.synchronize(handle)) is None:
        name = invocation.function if invocation.name is None else invocation.name
        raise HorovodInternalError(f"{name!r}: hvd.shutdown() was called while it was in flight.")
    return list(results)


def _name_in_graph(invocation: Invocation, tensors: Sequence[Any]) -> str:
    """Return a name that is unique in the graph, made of the tensors' names as Horovod makes it if there is none."""
    graph = tf.compat.v1.get_default_graph()
    name = invocation.name
    if name is None:
        kind = "".join(word.capitalize() for word in invocation.function.split("_"))
        ends = [tensors[0].name, tensors[-1].name] if len(tensors) > 1 else [tensors[0].name]
        # A captured tensor has a number for a name, which differs between ranks.
        ends = ["captured" if re.fullmatch(r"\d+(:\d+)?", end) else end for end in ends]
        name = re.sub("[^a-zA-Z0-9_]", "_", "_".join([f"Horovod{kind}", *ends]))
    with graph.name_scope(None) if invocation.ignore_name_scope else nullcontext():
        return str(graph.unique_name(name))


def differentiable(
    tensors: Sequence[Any],
    operate: Callable[[Sequence[Any]], list[Any]],
    reduce: Callable[[Sequence[Any], list[Any]], list[Any]],
) -> list[Any]:
    """Return ``operate(tensors)``, with gradients if a tape or a graph may ask for them.

    ``reduce`` returns the gradients of the differentiable tensors, given the tensors and the gradients of the results.
    A missing gradient of a result is zeros, since other ranks may have one.
    """
    if not _is_recorded():
        return operate(tensors)

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def recorded(*inputs: Any) -> tuple[list[Any], Callable[..., Any]]:
        outputs = operate(inputs)

        def backward(*upstream: Any) -> list[Any]:
            indices = [index for index, output in enumerate(outputs) if has_gradient(output)]
            gradients = [
                tf.zeros_like(outputs[index]) if upstream[index] is None else tf.convert_to_tensor(upstream[index])
                for index in indices
            ]
            reduced = dict(zip(indices, reduce(inputs, gradients) if gradients else [], strict=True))
            return [reduced.get(index) for index in range(len(outputs))]

        return outputs, backward

    return list(recorded(*tensors))


def allreduce_dense(invocation: Invocation, tensors: Sequence[Any], request: ReduceRequest) -> list[Any]:
    """Return the reduced tensors, after all checks. Their gradients are reduced in the same way, as Horovod's."""

    def start(invocation: Invocation, arrays: Sequence[Any]) -> int:
        return OPERATIONS.allreduce(invocation, arrays, request)

    return differentiable(
        tensors,
        lambda inputs: run(invocation, inputs, start, [(tensor.dtype, tensor.shape) for tensor in inputs]),
        lambda _, gradients: allreduce_dense(invocation.of_gradient(), gradients, request),
    )


def scalar(number: Callable[[], int], name: str | None = None) -> Any:
    """Return ``number()`` as an int32 scalar: of now, or of each run of the graph that is traced."""
    if tf.executing_eagerly():
        with raised_as_tensorflows():
            return tf.constant(number(), tf.int32)
    result = tf.numpy_function(in_graph(lambda: np.int32(number())), [], tf.int32, name=name)
    result.set_shape([])
    return result


def has_gradient(tensor: Any) -> bool:
    """True if the dtype of a tensor is one that TensorFlow differentiates."""
    return bool(tensor.dtype.is_floating or tensor.dtype.is_complex)


def _is_recorded() -> bool:
    """True if gradients may be asked for later: always in a graph, and in eager execution while a tape records."""
    if not tf.executing_eagerly():
        return True
    try:
        from tensorflow.python.eager import record
    except ImportError:  # a TensorFlow with another layout: slower, with the same results
        return True
    return bool(record.could_possibly_record())


def ordered_node(
    function: Callable[..., Any], inputs: Sequence[Any], dtypes: Any, name: str, first: bool = True, last: bool = True
) -> Any:
    """Add a node to the graph that runs after all earlier ordered nodes, and return its output or outputs.

    ``function`` takes an array for each input, and returns an array, or one for each dtype of a list. The order spans
    this graph and the graphs that call it. The node also runs after the graph's data has come, so that nothing begins
    at the end of the data. ``first``, ``last``: False inside of a series of nodes, to save the writes of the ordering
    variable between them. Raises NotImplementedError in graphs of TensorFlow 1.
    """
    if not tf.compat.v1.executing_eagerly_outside_functions():
        raise NotImplementedError(
            "hvd's operations need eager execution or tf.function, not graphs and sessions of TensorFlow 1.\n"
            "HINT: remove tf.compat.v1.disable_v2_behavior() and disable_eager_execution()."
        )
    graph = tf.compat.v1.get_default_graph()
    before, seen = _last_nodes.get(graph, (None, 0))
    data, seen = _data_of(graph, seen), len(graph.get_operations())
    with tf.control_dependencies(data if before is None else [before, *data]):
        turn = [_order().assign_add(1, read_value=False)] if first else []
        with tf.control_dependencies(turn):
            outputs = tf.numpy_function(in_graph(function), list(inputs), dtypes, name=name)
    node = (outputs[0] if isinstance(outputs, list | tuple) else outputs).op
    if last:
        with tf.control_dependencies([node]):
            node = _order().assign_add(1, read_value=False)
    _last_nodes[graph] = (node, seen)
    return outputs


@contextmanager
def after(tensors: Sequence[Any]) -> Iterator[None]:
    """Run the nodes of this context after ``tensors`` (None is left out) and after the graph's data.

    TensorFlow runs other nodes even where there is no batch: Keras's ``fit`` finds the end of data of unknown
    cardinality by one more run of its train function. Eager execution has this order anyway.
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
    """Return the arguments of a graph, and the nodes from the ``seen``-th on that take from an iterator."""
    inputs = () if seen else getattr(graph, "inputs", ())  # TensorFlow 1's graphs have none
    arguments = [tensor for tensor in inputs if tensor.dtype not in (tf.resource, tf.variant)]
    return [*arguments, *(node for node in graph.get_operations()[seen:] if node.type.startswith("IteratorGetNext"))]


@functools.lru_cache(maxsize=1)
def _order() -> Any:
    """Return the variable that every ordered node writes."""
    with tf.init_scope(), tf.device("CPU:0"):
        return tf.Variable(0, dtype=tf.int64, trainable=False, name="hvdkit_order")
