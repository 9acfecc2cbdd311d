"""The adapter of Keras's backend, collective operations on its tensors, and broadcasts of models and optimizers."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from hvdkit.api import backends, checks
from hvdkit.api.gradients import guard
from hvdkit.api.gradients.compression import Compressions
from hvdkit.engine.ops.requests import Call, ReduceRequest
from hvdkit.engine.session import runtime
from hvdkit.keras.keras_2 import variables_of
from hvdkit.kernels.reduce_op import ReduceOp


def backend_name() -> str:
    """Return the name of Keras's backend, "tensorflow" or "torch". Raises NotImplementedError for other backends."""
    name = str(keras.backend.backend())
    if name not in backends.ADAPTERS:
        raise NotImplementedError(
            f"hvdkit.keras: Keras runs on {name}, for which hvdkit does not reduce gradients.\n"
            "HINT: set KERAS_BACKEND=tensorflow or KERAS_BACKEND=torch before keras is imported."
        )
    return name


def adapter() -> Any:
    """Return the adapter's module, with the operations on the backend's tensors."""
    return importlib.import_module(backends.ADAPTERS[backend_name()])


def backend() -> backends.Backend:
    """Return the adapter's functions for Keras."""
    functions: backends.Backend = importlib.import_module(f"{backends.ADAPTERS[backend_name()]}.for_keras").BACKEND
    return functions


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: int | None = None,
    compression: Any = Compressions.none,
) -> Any:
    """Reduce a tensor, or a value that becomes a tensor, over all ranks; by default to the average.

    The other arguments and the errors are those of hvdkit.tensorflow.allreduce(). Returns a tensor of the backend, of
    the same shape and dtype.

    Args:
        value: a tensor of the backend, an array, a variable or a number, of the same shape and dtype on all ranks.
            Dtypes are those of the backend's allreduce().

    Examples:
        >>> keras.ops.convert_to_numpy(hvd.allreduce(x[0])).tolist()
        [1.5, 1.5]
    """
    result = adapter().allreduce(
        backend().tensor(value),
        name=name,
        op=checks.op_or_average("allreduce", op, average),
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        compression=compression,
    )
    guard.mark([result])
    return result


def allgather(value: Any, name: str | None = None) -> Any:
    """Concatenate the tensors of all ranks along the first dimension. ``name`` and errors are those of allreduce().

    ``value`` has the same dtype on all ranks, and a shape of at least one dimension, of which the first may differ.
    Returns a tensor of the backend.

    Examples:
        >>> keras.ops.convert_to_numpy(hvd.allgather([hvd.rank()])).tolist()
        [0, 1]
    """
    return adapter().allgather(backend().tensor(value), name=name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """Return the tensor of ``root_rank`` on all ranks. ``name`` and errors are those of allreduce().

    ``value`` has the same shape and dtype on all ranks. Returns a tensor of the backend.

    Examples:
        >>> keras.ops.convert_to_numpy(hvd.broadcast([hvd.rank()], root_rank=1)).tolist()
        [1]
    """
    return adapter().broadcast(backend().tensor(value), root_rank, name=name)


def reducescatter(value: Any, name: str | None = None, op: int = ReduceOp.AVERAGE) -> Any:
    """Reduce a tensor over all ranks, and return this rank's share of it along the first dimension.

    ``name`` and errors are those of allreduce(), ``op`` is hvd.Average or hvd.Sum. ``value`` has the same shape, of at
    least one dimension, and dtype on all ranks. Returns a tensor of the backend, with rows / ranks rows, and one more
    row on each of the first (rows % ranks) ranks.

    Examples:
        >>> keras.ops.convert_to_numpy(hvd.reducescatter([1.0, 2.0, 3.0], op=hvd.Sum)).tolist()  # on rank 1: [6.0]
        [2.0, 4.0]
    """
    return adapter().reducescatter(backend().tensor(value), name=name, op=op)


def broadcast_variables(variables: Sequence[Any], root_rank: int = 0) -> None:
    """Write the values of ``root_rank`` into the variables (of a model, an optimizer) on all ranks.

    ``variables`` are Keras's, on TensorFlow also tf.Variable, in the same order on all ranks, each of the same shape
    and dtype. Raises TypeError for an object that is no variable, ValueError for variables without values yet, and
    HorovodInternalError on every rank where ranks disagree.

    Examples:
        >>> _ = model.layers[0].bias.assign([float(hvd.rank())])
        >>> hvd.broadcast_variables(model.variables, root_rank=1)
        >>> keras.ops.convert_to_numpy(model.layers[0].bias).tolist()
        [1.0]
    """
    backend().broadcast_variables(checks.check_variables("broadcast_variables", variables), root_rank)


def broadcast_global_variables(root_rank: int, model: Any = None) -> None:
    """Give all ranks the values of ``root_rank`` of all variables of ``model``, of Keras, and of its optimizer.

    Raises RuntimeError without a model, as Horovod does in eager execution, since Keras 3 keeps no list of all
    variables. The other errors are those of broadcast_variables().

    Examples:
        >>> _ = model.layers[0].bias.assign([float(hvd.rank())])
        >>> hvd.broadcast_global_variables(1, model)
        >>> keras.ops.convert_to_numpy(model.layers[0].bias).tolist()
        [1.0]
    """
    if model is None:
        raise RuntimeError(
            "hvd.broadcast_global_variables() does not support eager execution. "
            "Please use `hvd.broadcast_global_variables(root_rank, model)`, `hvd.broadcast_variables(model.variables, "
            "root_rank)` or the callback BroadcastGlobalVariablesCallback instead."
        )
    broadcast_variables([*model.variables, *variables_of(getattr(model, "optimizer", None))], root_rank)


def numbers_of(value: Any) -> Any:
    """Return a number, an array or a tensor as an array; None for values that are not real numbers."""
    if not (isinstance(value, int | float) or hasattr(value, "shape")):
        return None
    array = np.asarray(keras.ops.convert_to_numpy(value))
    return array if np.can_cast(array.dtype, np.float64, "same_kind") else None


def average_values(values: Sequence[Any], arrays: Sequence[Any], name: str) -> list[Any]:
    """Return the averages over all ranks of a few small values, in their form: numbers, arrays or tensors.

    ``arrays`` has ``numbers_of`` each value; values without numbers stay. Averages are computed in float64; arrays of
    integers and booleans stay in it.
    """
    numbers = np.concatenate([np.zeros(0), *(each.astype(np.float64).ravel() for each in arrays if each is not None)])
    if numbers.size:
        runtime.engine().named.allreduce([numbers], ReduceRequest(ReduceOp.AVERAGE), Call(name, wake=False)).wait()
    averages, begin = list(values), 0
    for index, array in enumerate(arrays):
        if array is None:
            continue
        part = numbers[begin : begin + array.size]
        begin += array.size
        average = part.reshape(array.shape).astype(np.float64 if array.dtype.kind in "biu" else array.dtype)
        to_form = np.asarray if isinstance(values[index], np.ndarray) else keras.ops.convert_to_tensor
        averages[index] = to_form(average) if array.ndim else float(average)
    return averages
