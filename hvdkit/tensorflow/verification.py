"""Verification of the variables of a step, hashed before its update: eagerly, or by a branch of the graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import tensorflow as tf

from hvdkit import kernels
from hvdkit.api.gradients.verification import Verification
from hvdkit.api.machine import machine
from hvdkit.engine.telemetry.verifying import Statement, sketch
from hvdkit.tensorflow.ops.bridge import as_written
from hvdkit.tensorflow.ops.exceptions import in_graph
from hvdkit.tensorflow.ops.framework import as_array

BROADCAST = "hvd.broadcast_variables(model.variables, root_rank=0), or BroadcastGlobalVariablesCallback(0) in fit()"

# The variables that are hashed in a step: none, those with dense gradients, all.
NOTHING, DENSE, ALL = range(3)


@dataclass(frozen=True)
class Verified:
    """A variable of TensorFlow that all ranks train alike; it is hashed in steps of its ``level`` and above."""

    name: str
    handle: Any
    dtype: Any
    level: int

    def read(self) -> Any:
        """Return its value, by the operation itself, so that no tape and no custom gradient takes it for an input."""
        return tf.raw_ops.ReadVariableOp(resource=self.handle, dtype=self.dtype)

    @property
    def precision(self) -> float:
        """The eps of the variable's type."""
        if not (self.dtype.is_floating or self.dtype.is_complex):
            return 0.0
        return float(ml_dtypes.finfo(self.dtype.as_numpy_dtype).eps)  # type: ignore[no-untyped-call]


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
    """The verification of a step's sources. ``hash`` and ``hashed`` are called between the step's begin and end."""

    def __init__(self) -> None:
        super().__init__(BROADCAST)
        self._hashes: dict[int, tuple[int, Any]] = {}  # by index, with sketches, of the step that is under way

    def begin(self) -> int:
        """Begin a step. Returns the level of the variables that are to be hashed in it."""
        self._hashes.clear()
        return NOTHING if not self.wants(self.step) else ALL if self.wants(self.step, sparse=True) else DENSE

    def hash(self, index: int, value: Any) -> None:
        """Hash the value of a variable, an array or an eager tensor. Only one at a time is copied from a device."""
        flat = np.ascontiguousarray(as_array(value)).reshape(-1)
        real = flat.view(flat.real.dtype)
        sketched = sketch(real.size, lambda begin, end: real[begin:end]) if self.wants_sketches else None
        self._hashes[index] = kernels.checksum(flat.view(np.uint8)), sketched

    def hashed(self, variables: Sequence[Verified]) -> None:
        """State the hashes of the variables that were hashed in this step, if there are any."""
        if not self._hashes:
            return
        indices = sorted(self._hashes)
        hashes, sketches = zip(*(self._hashes[index] for index in indices), strict=True)
        details = [tf.config.experimental.get_device_details(gpu) for gpu in tf.config.list_physical_devices("GPU")]
        gpus = sorted({str(each.get("device_name", "GPU")) for each in details})
        threads = tf.config.threading.get_intra_op_parallelism_threads()
        statement = Statement(
            machine(f"{threads} threads", f"tensorflow {tf.__version__}", *gpus),
            np.array(hashes, dtype=np.uint64),
            sketches=np.array(sketches) if self.wants_sketches else None,
            names=[variables[index].name for index in indices],
            precisions=[variables[index].precision for index in indices],
        )
        self.state(statement)


@as_written
def hash_in_graph(verification: VariableVerification, variables: Sequence[Verified], wanted: Any) -> list[Any]:
    """Hash the variables that are ``wanted``, a tensor, in a graph. Returns the operations after which that is done.

    TensorFlow orders the branches that read a variable and the operations that write it, as the program has them.
    """
    nothing = partial(tf.constant, 0, tf.int64)

    @as_written
    def hash_each(indices: Sequence[int]) -> Any:
        last = nothing()
        for index in indices:
            hash_it = in_graph(partial(verification.hash, index))
            with tf.control_dependencies([last]):
                last = tf.numpy_function(hash_it, [variables[index].read()], tf.int64, name="hvdkit_hash")
        return last

    done: list[Any] = []
    for level in (DENSE, ALL):
        indices = [index for index, variable in enumerate(variables) if variable.level == level]
        if indices:
            with tf.control_dependencies(done):
                done = [tf.cond(wanted >= level, partial(hash_each, indices), nothing)]
    if done:
        state = in_graph(partial(verification.hashed, variables))
        with tf.control_dependencies(done):
            done = [tf.numpy_function(state, [], tf.int64, name="hvdkit_state")]
    return done
