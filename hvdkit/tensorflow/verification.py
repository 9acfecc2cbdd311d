"""Verification of the variables of a step, hashed before its update: eagerly, or by a branch of the graph."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import tensorflow as tf

from hvdkit import kernels
from hvdkit.api.gradients.guard import framework_variable
from hvdkit.api.gradients.verification import ALL, CHUNK, DENSE, NOTHING, Statement, Verification, sketch
from hvdkit.api.machine import machine
from hvdkit.collectives.group import Array
from hvdkit.tensorflow.ops.bridge import as_written
from hvdkit.tensorflow.ops.exceptions import in_graph
from hvdkit.tensorflow.ops.framework import as_array

BROADCAST = "hvd.broadcast_variables(model.variables, root_rank=0), or BroadcastGlobalVariablesCallback(0) in fit()"


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
        variable = framework_variable(source)
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
        return self.level()

    def hash(self, variable: Verified, value: Any) -> None:
        """Hash the value of a variable, an array or an eager tensor. The host has a copy of a single variable."""
        flat = as_array(value).reshape(-1)
        sketched = _sketch_of(flat) if self.wants_sketches else None
        self._hashed.append((variable, kernels.checksum(flat.view(np.uint8)), sketched))

    def state_hashes(self) -> None:
        """State the hashes of the variables that were hashed in this step."""
        if not self._hashed:
            return
        variables, hashes, sketches = zip(*self._hashed, strict=True)
        details = [tf.config.experimental.get_device_details(gpu) for gpu in tf.config.list_physical_devices("GPU")]
        gpus = sorted({str(each.get("device_name", "GPU")) for each in details})
        threads = tf.config.threading.get_intra_op_parallelism_threads()
        self.state(
            Statement(
                machine(f"{threads} threads", f"tensorflow {tf.__version__}", *gpus),
                [variable.name for variable in variables],
                [_precision(each.dtype) for each in variables],
                np.array(hashes, dtype=np.uint64),
                sketches if self.wants_sketches else None,
            )
        )


def _precision(dtype: tf.DType) -> float:
    if not dtype.is_floating and not dtype.is_complex:
        return 0.0
    return float(ml_dtypes.finfo(dtype.as_numpy_dtype).eps)  # type: ignore[no-untyped-call]


def _sketch_of(flat: Array) -> Array:
    real = flat.view(flat.real.dtype)
    return sketch(real[begin : begin + CHUNK] for begin in range(0, real.size, CHUNK))


@as_written
def hash_variables(verification: VariableVerification, variables: Sequence[Verified], wanted: Any) -> list[Any]:
    """Hash the variables of the level ``wanted``. Returns, in a graph, the operations after which that is done.

    TensorFlow orders the branches that read a variable and the operations that write it, as the program has them.
    """
    by_level = [[variable for variable in variables if variable.level <= level] for level in (NOTHING, DENSE, ALL)]
    if tf.executing_eagerly():
        for variable in by_level[wanted]:
            verification.hash(variable, variable.read())
        return []

    def branch(chosen: Sequence[Verified]) -> Any:
        last = tf.constant(0, tf.int64)
        for variable in chosen:  # one after the other: the host has a copy of each
            hash_it = in_graph(partial(verification.hash, variable))
            with tf.control_dependencies([last]):
                last = tf.numpy_function(hash_it, [variable.read()], tf.int64, name="hvdkit_hash")
        return last

    return [tf.switch_case(tf.cast(wanted, tf.int32), [as_written(partial(branch, chosen)) for chosen in by_level])]
