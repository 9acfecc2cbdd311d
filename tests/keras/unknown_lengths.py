"""Training on data whose number of batches nobody knows, in Keras 3 and Keras 2, against one process that knows it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tests.keras.batches import FEATURES, batches, joined

BATCHES, EPOCHS = 4, 3


def of_unknown_length(data: Sequence[tuple[Any, ...]]) -> Any:
    """The batches as a tf.data.Dataset that does not know how many there are."""
    import tensorflow as tf

    signature = tuple(tf.TensorSpec((None, *part.shape[1:]), part.dtype) for part in data[0])
    return tf.data.Dataset.from_generator(lambda: iter(data), output_signature=signature)


def penalised(keras: Any, optimizer: Any, **options: Any) -> Any:
    """A model that has a weight of which the gradient does not depend on the data."""
    import tensorflow as tf

    class Penalty(keras.layers.Layer):  # type: ignore[misc]  # known at run time only
        def build(self, shape: Any) -> None:
            self.weight = self.add_weight(name="weight", shape=(3,), initializer="ones")

        def call(self, x: Any) -> Any:
            self.add_loss(tf.cast(tf.reduce_sum(tf.square(tf.convert_to_tensor(self.weight))), tf.float32))
            return x

    keras.utils.set_random_seed(1)
    hidden, last = (keras.layers.Dense(width, dtype="float64") for width in (8, 1))
    made = keras.Sequential([keras.layers.Input((FEATURES,), dtype="float64"), hidden, last, Penalty(dtype="float64")])
    made.compile(optimizer=optimizer, loss="mse", **options)
    return made


def check_the_end_is_no_pass(hvd: Any, keras: Any, new: Callable[[], Any], passes: int, **options: Any) -> None:
    """``fit`` on data of unknown length gives what as many steps on the joined batches give."""
    optimizer = hvd.DistributedOptimizer(new(), backward_passes_per_step=passes, average_aggregated_gradients=True)
    ours = penalised(keras, optimizer, **options)
    ours.fit(of_unknown_length(batches(hvd.rank(), BATCHES)), epochs=EPOCHS, verbose=0)
    alone, data = penalised(keras, new()), joined(hvd, BATCHES) * EPOCHS
    for start in range(0, len(data), passes):
        alone.train_on_batch(*(np.concatenate(part) for part in zip(*data[start : start + passes], strict=True)))
    assert int(ours.optimizer.iterations) == int(alone.optimizer.iterations) == len(data) // passes
    for mine, theirs in zip(ours.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, 1e-6, 1e-6)
    assert len(set(hvd.allgather_object(b"".join(value.tobytes() for value in ours.get_weights())))) == 1
