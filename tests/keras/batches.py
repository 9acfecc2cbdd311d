"""Data that each rank knows of all others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

NOT_WRAPPED = "with gradients of rank"  # in a warning
ROWS, FEATURES = 4, 6


def not_wrapped(hvd: Any, name: str, kind: str) -> str:
    """The whole warning about an optimizer of the name and the class."""
    return (
        f"The optimizer '{name}' ({kind}) updates variables with gradients of rank {hvd.rank()} alone: the "
        f"{hvd.size()} ranks train different models.\n"
        "HINT: wrap it, optimizer = hvd.DistributedOptimizer(optimizer), also after a model was loaded (or use "
        "hvd.load_model). A loop of your own reduces gradients by hvdkit.tensorflow.DistributedGradientTape, or by "
        "hvd.allreduce, whose results it must not change. If it changes them, or if ranks train apart on purpose, call "
        "hvd.unsynchronized(optimizer)."
    )


def batches(rank: int, steps: int = 3) -> list[tuple[Any, Any]]:
    """A rank's batches, in float64."""
    inputs = np.random.default_rng(rank).normal(size=(steps, ROWS, FEATURES))
    return [(x, (x.sum(1, keepdims=True) > 0).astype(np.float64)) for x in inputs]


def whole(data: Sequence[tuple[Any, Any]]) -> tuple[Any, ...]:
    """Return batches as one: inputs and targets."""
    return tuple(np.concatenate(part) for part in zip(*data, strict=True))


def joined(hvd: Any, steps: int = 3, ranks: Sequence[int] = ()) -> list[tuple[Any, ...]]:
    """All ranks' batches, or those of ``ranks``, one after the other."""
    everyones = [batches(rank, steps) for rank in ranks or range(hvd.size())]
    return [whole(of_step) for of_step in zip(*everyones, strict=True)]
