"""Small models of Keras 3, on both of its backends, or of Keras 2."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from tests.keras.batches import FEATURES, joined

IS_KERAS_2 = os.environ.get("TF_USE_LEGACY_KERAS") == "1"
if IS_KERAS_2:
    from tensorflow import keras
else:
    import keras
TENSORFLOW = IS_KERAS_2 or keras.backend.backend() == "tensorflow"


@keras.saving.register_keras_serializable(package="hvdkit_tests")
class Registered(keras.optimizers.SGD):
    """Somebody's optimizer, registered."""


def model(seed: int = 1, dtype: str = "float64") -> Any:
    """Two layers; the same weights for the same seed."""
    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [
            keras.layers.Input((FEATURES,), dtype="float64"),
            keras.layers.Dense(8, activation="tanh", dtype=dtype),
            keras.layers.Dense(1, activation="sigmoid", dtype=dtype),
        ]
    )


def compiled(optimizer: Any, seed: int = 1, dtype: str = "float64", **options: Any) -> Any:
    made = model(seed, dtype)
    made.compile(optimizer=optimizer, loss="mse" if IS_KERAS_2 else keras.losses.MeanSquaredError(), **options)
    return made


def train(made: Any, data: Sequence[tuple[Any, ...]]) -> Any:
    for x, y in data:
        made.train_on_batch(x, y)
    return made


def steps_of_one_process(optimizer: Any, hvd: Any, steps: int = 3) -> Any:
    """The model after one process took the steps, on all ranks' batches."""
    return train(compiled(optimizer), joined(hvd, steps))


def gradients_of(made: Any, x: Any, y: Any) -> list[Any]:
    """Return the gradients of the mean square error, by the backend's own means."""
    if TENSORFLOW:
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(made(x) - y))
        return list(tape.gradient(loss, made.trainable_variables))
    import torch

    loss = torch.mean(torch.square(made(torch.as_tensor(x)) - torch.as_tensor(y)))
    return list(torch.autograd.grad(loss, [variable.value for variable in made.trainable_variables]))
