"""Keras on TensorFlow: ``DistributedOptimizer`` of Horovod's TensorFlow API, and the backend of hvdkit.keras."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import tensorflow as tf

from hvdkit.api import backends
from hvdkit.api.gradients.settings import GradientSettings
from hvdkit.engine.session.process_sets import ProcessSet, global_process_set
from hvdkit.kernels.reduce_op import ReduceOp
from hvdkit.tensorflow.compression import Compression
from hvdkit.tensorflow.functions import broadcast_variables
from hvdkit.tensorflow.gradients import reduce_gradients
from hvdkit.tensorflow.ops.bridge import after, as_written

Optimizer = TypeVar("Optimizer")


@dataclass(frozen=True)
class TensorFlowGradients(backends.OptimizerGradients):
    """Gradients that are reduced when they are applied. In a graph each part leaves as soon as it is computed."""

    settings: GradientSettings

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any], local: Collection[int]) -> list[Any]:
        return reduce_gradients(self.settings, gradients, variables, local)


BACKEND = backends.Backend(tf.convert_to_tensor, TensorFlowGradients, broadcast_variables, as_written, after)


def DistributedOptimizer(
    optimizer: Optimizer,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: int = ReduceOp.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | list[list[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Optimizer:
    """Return an optimizer of Keras that trains on all ranks.

    The other arguments and errors are those of hvdkit.keras.DistributedOptimizer(). Returns the optimizer to use in the
    place of ``optimizer``.

    Args:
        optimizer: an optimizer of Keras; those of TensorFlow 1 (tf.compat.v1.train) raise TypeError.
        use_locking: of TensorFlow 1, and not used.

    Examples:
        >>> optimizer = hvd.DistributedOptimizer(optimizer)
        >>> with tf.GradientTape() as tape:
        ...     loss = tf.reduce_mean(model(x))
        >>> optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        >>> print(model.get_weights()[0].round(2).ravel())
        [0.85 0.85]
    """
    from hvdkit.tensorflow import keras as hvd_keras

    return hvd_keras.DistributedOptimizer(
        optimizer,
        name=name,
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        op=op,
        backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients,
        num_groups=num_groups,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
