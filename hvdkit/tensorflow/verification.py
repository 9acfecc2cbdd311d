"""The variables of a step, hashed before its update as the last one left them: eagerly, or by a branch of the graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import tensorflow as tf

from hvdkit import kernels
from hvdkit.api.gradients.verification import Verification, rounding_limit
from hvdkit.api.machine import machine
from hvdkit.collectives.group import Array
from hvdkit.engine.telemetry.verifying import Statement, sketch
from hvdkit.tensorflow.ops.bridge import as_written
from hvdkit.tensorflow.ops.exceptions import in_graph
from hvdkit.tensorflow.ops.framework import as_array

BROADCAST = "hvd.broadcast_variables(model.variables, root_rank=0), or BroadcastGlobalVariablesCallback(0) in fit()"

# What is wanted of a step: nothing, the variables with dense gradients, all.
NOTHING, DENSE, ALL = range(3)


@dataclass(frozen=True)
class Verified:
    """A variable of TensorFlow that all ranks train alike. ``level``: in which steps it is looked at."""

    name: str
    handle: Any
    dtype: Any
    level: int

    def read(self) -> Any:
        """Its value. By the operation itself, so that no tape and no custom gradient takes it for an input."""
        return tf.raw_ops.ReadVariableOp(resource=self.handle, dtype=self.dtype)


def verified(names: Sequence[str], sources: Sequence[Any], sparse: Sequence[bool]) -> list[Verified]:
    """Those of ``sources`` that are variables with one value in this process, of TensorFlow or of Keras."""
    found = []
    for name, source, is_sparse in zip(names, sources, sparse, strict=True):
        under = getattr(source, "_value", None)  # of Keras 3
        variable = source if under is None or callable(under) else under
        if isinstance(variable, tf.Variable) and hasattr(variable, "handle"):
            found.append(Verified(name, variable.handle, variable.dtype, ALL if is_sparse else DENSE))
    return found


class VariableVerification(Verification):
    """Of the sources of a step. ``look`` and ``looked`` come between the step's begin and its end."""

    def __init__(self) -> None:
        super().__init__(BROADCAST)
        self._hashes: dict[int, int] = {}  # by index, of the step that is under way
        self._sketches: dict[int, Array] = {}

    def begin(self) -> int:
        """A step begins: what is wanted of it."""
        self._hashes.clear()
        self._sketches.clear()
        return NOTHING if not self.wants(self.step) else ALL if self.wants_sparse(self.step) else DENSE

    def look(self, index: int, value: Any) -> None:
        """Hash one value, an array or an eager tensor; one at a time is copied from a device."""
        flat = np.ascontiguousarray(as_array(value)).reshape(-1)
        self._hashes[index] = kernels.checksum(flat.view(np.uint8))
        if self.wants_sketches:
            real = flat.view(flat.real.dtype)
            self._sketches[index] = sketch(real.size, lambda begin, end: real[begin:end])

    def looked(self, variables: Sequence[Verified]) -> None:
        """All that is wanted of these variables was looked at."""
        if self._hashes:
            threads = tf.config.threading.get_intra_op_parallelism_threads()
            where = machine(f"{threads} threads", f"tensorflow {tf.__version__}", *_devices())
            indices = sorted(self._hashes)
            hashes = np.array([self._hashes[index] for index in indices], dtype=np.uint64)
            sketches = np.array([self._sketches[index] for index in indices]) if self._sketches else None
            limits = [rounding_limit(_precision(variables[index].dtype)) for index in indices]
            names = [variables[index].name for index in indices]
            self.state(names, limits, Statement(where, hashes, sketches=sketches))


def _precision(dtype: Any) -> float:
    if not (dtype.is_floating or dtype.is_complex):
        return 0.0
    return float(ml_dtypes.finfo(dtype.as_numpy_dtype).eps)  # type: ignore[no-untyped-call]


def _devices() -> list[str]:
    """The kinds of GPUs that this process sees."""
    details = [tf.config.experimental.get_device_details(gpu) for gpu in tf.config.list_physical_devices("GPU")]
    return sorted({str(one.get("device_name", "GPU")) for one in details})


def look_now(verification: VariableVerification, variables: Sequence[Verified], wanted: int) -> None:
    """In eager execution."""
    for index, variable in enumerate(variables):
        if wanted >= variable.level:
            verification.look(index, variable.read())
    verification.looked(variables)


@as_written
def look_in_graph(verification: VariableVerification, variables: Sequence[Verified], wanted: Any) -> list[Any]:
    """In a graph, where ``wanted`` is a tensor: the operations after which it is done.

    TensorFlow orders the branches that read a variable and all that writes it, as the program has them.
    """
    done: list[Any] = []
    for level in (DENSE, ALL):
        indices = [index for index, variable in enumerate(variables) if variable.level == level]
        if indices:
            look = _looking_at(verification, variables, indices)
            with tf.control_dependencies(done):
                done = [tf.cond(wanted >= level, look, lambda: tf.constant(0, tf.int64))]
    if done:
        tell = in_graph(partial(verification.looked, variables))
        with tf.control_dependencies(done):
            done = [tf.numpy_function(tell, [], tf.int64, name="hvdkit_told")]
    return done


def _looking_at(
    verification: VariableVerification, variables: Sequence[Verified], indices: Sequence[int]
) -> Callable[[], Any]:
    """The branch that looks at some variables, one after the other."""

    @as_written
    def branch() -> Any:
        last = tf.constant(0, tf.int64)
        for index in indices:
            look = in_graph(partial(verification.look, index))
            with tf.control_dependencies([last]):
                last = tf.numpy_function(look, [variables[index].read()], tf.int64, name="hvdkit_hash")
        return last

    return branch
