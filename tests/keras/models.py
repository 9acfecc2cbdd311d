"""Small models and data that each rank knows of all others, and how weights are compared."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from tests.keras.batches import FEATURES, joined, train


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
    """The model with an optimizer."""
    made = model(seed, dtype)
    made.compile(optimizer=optimizer, loss=keras.losses.MeanSquaredError(), **options)
    return made


def numbers(variables: Sequence[Any]) -> list[Any]:
    """The values of variables."""
    return [keras.ops.convert_to_numpy(variable.value) for variable in variables]


def check_close(ours: Any, other: Any, rtol: float = 1e-5, atol: float = 1e-7) -> None:
    """Two models have the same weights."""
    for mine, theirs in zip(numbers(ours.variables), numbers(other.variables), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol, atol)


def check_same_bits(hvd: Any, made: Any) -> None:
    """All ranks have the same model and the same state of its optimizer."""
    values = numbers([*made.variables, *made.optimizer.variables])
    digest = hashlib.sha256(b"".join(value.tobytes() for value in values)).hexdigest()
    assert len(set(hvd.allgather_object(digest))) == 1


def steps_of_one_process(optimizer: Any, hvd: Any, steps: int = 3) -> Any:
    """The model after one process took the steps, on all ranks' batches."""
    return train(compiled(optimizer), joined(hvd, steps))
