"""Data that each rank knows of all others, for models of Keras 3 and of Keras 2."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

NOT_WRAPPED = "with gradients of rank"
ROWS = 4
FEATURES = 6


def batches(rank: int, steps: int = 3) -> list[tuple[Any, Any]]:
    """A rank's batches, in float64."""
    numbers = np.random.default_rng(rank)
    inputs = numbers.normal(size=(steps, ROWS, FEATURES))
    return [(x, (x.sum(1, keepdims=True) > 0).astype(np.float64)) for x in inputs]


def joined(hvd: Any, steps: int = 3) -> list[tuple[Any, Any]]:
    """All ranks' batches, one after the other."""
    everyones = [batches(rank, steps) for rank in range(hvd.size())]
    return [
        (np.concatenate([own[step][0] for own in everyones]), np.concatenate([own[step][1] for own in everyones]))
        for step in range(steps)
    ]


def train(made: Any, data: Sequence[tuple[Any, Any]]) -> Any:
    """A step for each batch."""
    for x, y in data:
        made.train_on_batch(x, y)
    return made
