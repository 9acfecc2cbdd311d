"""Conditions for cases, and comparisons of models, in Keras 3 and in Keras 2."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.keras.models import IS_KERAS_2, TENSORFLOW
from tests.ranks import Skip


def only_tensorflow() -> None:
    if not TENSORFLOW:
        raise Skip("of the TensorFlow backend")


def only_with_others(hvd: Any) -> None:
    if hvd.size() == 1:
        raise Skip("needs other ranks")


def numbers(variables: Sequence[Any]) -> list[Any]:
    return [np.array(variable.numpy()) for variable in variables]


def check_equal(values: Sequence[Any], others: Sequence[Any]) -> None:
    for value, other in zip(values, others, strict=True):
        np.testing.assert_array_equal(value, other)


def check_close(made: Any, other: Any, rtol: float = 1e-5, atol: float = 1e-7) -> None:
    """Assert that two models or layers have the same weights but for rounding."""
    for value, expected in zip(numbers(made.variables), numbers(other.variables), strict=True):
        np.testing.assert_allclose(value, expected, rtol, atol)


def check_same_bits(hvd: Any, made: Any) -> None:
    """Assert that all ranks have the same model, and in Keras 3 the same state of its optimizer."""
    values = numbers([*made.variables, *(() if IS_KERAS_2 else made.optimizer.variables)])
    assert len(set(hvd.allgather_object(b"".join(value.tobytes() for value in values)))) == 1
