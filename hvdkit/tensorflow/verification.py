"""Verification of the variables of a step, hashed before its update: eagerly, or by a branch of the graph."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import tensorflow as tf

from hvdkit import kernels
from hvdkit.api.gradients.verification import Verification
from hvdkit.api.machine import machine
from hvdkit.collectives.group import Array
from hvdkit.engine.telemetry.verifying import Statement, sketch
from hvdkit.tensorflow.ops.bridge import as_written
from hvdkit.tensorflow.ops.exceptions import in_graph
from hvdkit.tensorflow.ops.framework import as_array

BROADCAST = "hvd.broadcast_variables(model.variables, root_rank=0), or BroadcastGlobalVariablesCallback(0) in fit()"

# The variables that are hashed in a step: none, those with dense gradients, all.
NOTHING, DENSE, ALL = range(3)


class Verified(NamedTuple):
    """A variable of TensorFlow that all ranks train alike; it is hashed in steps of its ``level`` and above.

    The variable itself would be kept alive by graphs.
    """

    name: str
    handle: Any
    dtype: Any
    level: int

    def read(self) -> Any:
        """Return its value, by the operation itself, so that no tape and no custom gradient takes it for an input."""
        return tf.raw_ops.ReadVariableOp(resource=self.handle, dtype=self.dtype)


def verified(names: Sequence[str], sources: Sequence[Any], sparse: Sequence[bool]) -> list[Verified]:
    """Return the sources that are variables with one value in this process, of TensorFlow or of Keras."""
    variables = []
    for name, source, is_sparse in zip(names, sources, sparse, strict=True):
        under = getattr(source, "_value", None)  # of Keras 3
        variable = source if under is None or callable(under) else under
        if isinstance(variable, tf.Variable) and hasattr(variable, "handle"):
            variables.append(Verified(name, variable.handle, variable.dtype, ALL if is_sparse else DENSE))
    return variables


class VariableVerification(Verification):
    """The verification of a step's sources, which are hashed between the step's begin and end."""

    def begin(self) -> int:
        """Begin a step. Returns the level of the variables that are to be hashed in it."""
        return NOTHING if not self.wants(self.step) else ALL if self.wants(self.step, sparse=True) else DENSE

    def hash(self, variables: Sequence[Verified], *values: Any) -> None:
        """Hash and state the values of variables, arrays or eager tensors."""
        flats = [np.ascontiguousarray(as_array(value)).reshape(-1) for value in values]
        hashes = np.array([kernels.checksum(flat.view(np.uint8)) for flat in flats], dtype=np.uint64)
        sketches = np.array([_sketch_of(flat) for flat in flats]) if self.wants_sketches else None
        details = [tf.config.experimental.get_device_details(gpu) for gpu in tf.config.list_physical_devices("GPU")]
        gpus = sorted({str(each.get("device_name", "GPU")) for each in details})
        threads = tf.config.threading.get_intra_op_parallelism_threads()
        on = machine(f"{threads} threads", f"tensorflow {tf.__version__}", *gpus)
        names, precisions = [each.name for each in variables], [_precision(each.dtype) for each in variables]
        self.state(Statement(on, hashes, sketches, names=names, precisions=precisions))


def _sketch_of(flat: Array) -> Array:
    real = flat.view(flat.real.dtype)
    return sketch(real.size, lambda begin, end: real[begin:end])


def _precision(dtype: Any) -> float:
    is_inexact = dtype.is_floating or dtype.is_complex
    return float(ml_dtypes.finfo(dtype.as_numpy_dtype).eps) if is_inexact else 0.0  # type: ignore[no-untyped-call]


@as_written
def hash_variables(verification: VariableVerification, variables: Sequence[Verified], wanted: Any) -> list[Any]:
    """Hash the variables of the level ``wanted``. Returns, in a graph, the operations after which that is done.

    TensorFlow orders the branches that read a variable and the operations that write it, as the program has them.
    """
    by_level = [[variable for variable in variables if variable.level <= level] for level in range(3)]
    if tf.executing_eagerly():
        if by_level[wanted]:
            verification.hash(by_level[wanted], *(variable.read() for variable in by_level[wanted]))
        return []

    def branch(chosen: Sequence[Verified]) -> Any:
        values = [variable.read() for variable in chosen]
        hash_them = in_graph(partial(verification.hash, chosen))
        return (
            tf.numpy_function(hash_them, values, tf.int64, name="hvdkit_hash") if values else tf.constant(0, tf.int64)
        )

    return [tf.switch_case(tf.cast(wanted, tf.int32), [as_written(partial(branch, chosen)) for chosen in by_level])]
