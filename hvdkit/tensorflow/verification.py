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

    def __init__(self, broadcast: str) -> None:
        super().__init__(broadcast)
        self._hashed: list[tuple[Verified, int, Any]] = []  # of the step under way: variables, hashes and sketches

    def begin(self) -> int:
        """Begin a step. Returns the level of the variables that are to be hashed in it."""
        self._hashed.clear()
        if not self.wants(self.step):
            return NOTHING
        return ALL if self.wants(self.step, sparse=True) else DENSE

    def hash(self, variable: Verified, value: Any) -> None:
        """Hash the value of a variable, an array or an eager tensor. The host has a copy of a single variable."""
        flat = np.ascontiguousarray(as_array(value)).reshape(-1)
        sketched = _sketch_of(flat) if self.wants_sketches else None
        self._hashed.append((variable, kernels.checksum(flat.view(np.uint8)), sketched))

    def state_hashes(self) -> None:
        """State the hashes of the variables that were hashed in this step."""
        variables, hashes, sketches = zip(*self._hashed, strict=True)
        details = [tf.config.experimental.get_device_details(gpu) for gpu in tf.config.list_physical_devices("GPU")]
        gpus = sorted({str(each.get("device_name", "GPU")) for each in details})
        threads = tf.config.threading.get_intra_op_parallelism_threads()
        on = machine(f"{threads} threads", f"tensorflow {tf.__version__}", *gpus)
        self.state(
            Statement(
                on,
                np.array(hashes, dtype=np.uint64),
                np.array(sketches) if self.wants_sketches else None,
                names=[variable.name for variable in variables],
                precisions=[_precision(variable.dtype) for variable in variables],
            )
        )


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
        for variable in by_level[wanted]:
            verification.hash(variable, variable.read())
        if by_level[wanted]:
            verification.state_hashes()
        return []

    def branch(chosen: Sequence[Verified]) -> Any:
        last = tf.constant(0, tf.int64)
        for variable in chosen:  # one after the other: the host has a copy of each
            hash_it = in_graph(partial(verification.hash, variable))
            with tf.control_dependencies([last]):
                last = tf.numpy_function(hash_it, [variable.read()], tf.int64, name="hvdkit_hash")
        if chosen:
            with tf.control_dependencies([last]):
                last = tf.numpy_function(in_graph(verification.state_hashes), [], tf.int64, name="hvdkit_state")
        return last

    return [tf.switch_case(tf.cast(wanted, tf.int32), [as_written(partial(branch, chosen)) for chosen in by_level])]
