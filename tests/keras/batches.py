"""Data that each rank knows of all others, and checks for models of Keras 3 and of Keras 2."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

ROWS = 4
FEATURES = 6


def batches(rank: int, steps: int = 3) -> list[tuple[Any, Any]]:
    """A rank's batches, in float64."""
    numbers = np.random.default_rng(rank)
    inputs = numbers.normal(size=(steps, ROWS, FEATURES))
    return [(x, (x.sum(1, keepdims=True) > 0).astype(np.float64)) for x in inputs]


def whole(data: Sequence[tuple[Any, Any]]) -> tuple[Any, Any]:
    """Return batches as one: inputs and targets."""
    x, y = (np.concatenate(part) for part in zip(*data, strict=True))
    return x, y


def joined(hvd: Any, steps: int = 3) -> list[tuple[Any, Any]]:
    """All ranks' batches, one after the other."""
    everyones = [batches(rank, steps) for rank in range(hvd.size())]
    return [whole([own[step] for own in everyones]) for step in range(steps)]


def dense_layers(keras: Any, seed: int = 1, dtype: str = "float64") -> Any:
    """Return a model of two layers; the same weights for the same seed."""
    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [
            keras.layers.Input((FEATURES,), dtype="float64"),
            keras.layers.Dense(8, activation="tanh", dtype=dtype),
            keras.layers.Dense(1, activation="sigmoid", dtype=dtype),
        ]
    )


def check_close(made: Any, other: Any, rtol: float = 1e-5, atol: float = 1e-7) -> None:
    """Check that two models or layers have the same weights but for rounding."""
    for own, expected in zip(made.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_allclose(own, expected, rtol, atol)


def check_same_bits(hvd: Any, made: Any) -> None:
    """Check that all ranks have the same model, and in Keras 3 the same state of its optimizer."""
    values = made.get_weights()
    if not callable(made.optimizer.variables):  # of Keras 3
        values += [np.asarray(one.numpy()) for one in made.optimizer.variables]
    assert len(set(hvd.allgather_object(b"".join(value.tobytes() for value in values)))) == 1


def train(made: Any, data: Sequence[tuple[Any, Any]]) -> Any:
    """A step for each batch."""
    for x, y in data:
        made.train_on_batch(x, y)
    return made
