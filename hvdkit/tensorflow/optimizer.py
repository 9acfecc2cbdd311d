"""``DistributedOptimizer`` of Horovod's TensorFlow API: for optimizers of Keras."""

from __future__ import annotations

from typing import Any, TypeVar

from hvdkit.engine.session.process_sets import ProcessSet, global_process_set
from hvdkit.kernels.reduce_op import ReduceOp
from hvdkit.tensorflow.compression import Compression

Optimizer = TypeVar("Optimizer")


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
    """An optimizer of Keras that trains on all ranks.

    The other arguments and errors are those of hvdkit.keras.DistributedOptimizer().

    Args:
        optimizer: one of Keras; those of TensorFlow 1 (tf.compat.v1.train) raise TypeError.
        use_locking: of TensorFlow 1, and not used.

    Returns:
        The optimizer to use in the place of ``optimizer``.

    Examples:
        >>> optimizer = hvd.DistributedOptimizer(optimizer)
        >>> with tf.GradientTape() as tape:
        ...     loss = tf.reduce_mean(model(x))
        >>> optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        >>> print(model.get_weights()[0].round(2).ravel())
        [0.85 0.85]
    """
    from hvdkit.tensorflow import keras as hvd_keras

    wrapped: Optimizer = hvd_keras.DistributedOptimizer(
        optimizer,
        name,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        gradient_predivide_factor,
        op,
        backward_passes_per_step,
        average_aggregated_gradients,
        num_groups,
        groups,
        process_set,
        scale_local_gradients,
    )
    return wrapped
