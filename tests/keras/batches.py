"""Data that each rank knows of all others, for models of Keras 3 and of Keras 2."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

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


def check_reading_changes_nothing(hvd: Any, make: Callable[[], Any]) -> None:
    """Check that reading attributes of an optimizer between steps changes no bit of model and optimizer."""
    weights = []
    for reads in (False, True):
        made = make()
        for x, y in batches(hvd.rank(), 4):
            if reads and hvd.rank() == 0:
                before = dict(vars(made.optimizer))
                inspect.getmembers(made.optimizer)
                hasattr(made.optimizer, "_step_supports_amp_scaling")
                mock.create_autospec(made.optimizer)
                repr(made.optimizer)
                assert vars(made.optimizer).keys() == before.keys()
            made.train_on_batch(x, y)
        weights.append(b"".join(np.asarray(value).tobytes() for value in made.get_weights()))
    assert weights[0] == weights[1]
    assert len(set(hvd.allgather_object(weights[1]))) == 1


def check_a_metric_of_several_values(hvd: Any, keras: Any) -> None:
    """MetricAverageCallback gives ``fit`` of either Keras the average of each class's F1."""

    class Kept(keras.callbacks.Callback):  # type: ignore[misc]  # known at run time only
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.values = [np.array(logs[name]) for name in ("f1", "val_f1", "loss")]

    inputs, labels = batches(hvd.rank(), 1)[0][0], np.random.default_rng(hvd.rank()).integers(0, 3, ROWS)
    made = keras.Sequential([keras.layers.Input((FEATURES,)), keras.layers.Dense(3, activation="softmax")])
    metrics = [keras.metrics.F1Score(average=None, name="f1")]
    made.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "categorical_crossentropy", metrics=metrics)
    before, after = Kept(), Kept()
    data = inputs.astype(np.float32), np.eye(3, dtype=np.float32)[labels]
    average = hvd.callbacks.MetricAverageCallback()
    history = made.fit(*data, verbose=0, validation_data=data, callbacks=[before, average, after])
    everyones = hvd.allgather_object(before.values)
    for index, name in enumerate(("f1", "val_f1", "loss")):
        expected = np.mean([values[index] for values in everyones], axis=0)
        assert expected.shape == (() if name == "loss" else (3,))
        np.testing.assert_allclose(after.values[index], expected, 1e-6)
        np.testing.assert_allclose(np.array(history.history[name][0]), expected, 1e-6)


def train(made: Any, data: Sequence[tuple[Any, Any]]) -> Any:
    """A step for each batch."""
    for x, y in data:
        made.train_on_batch(x, y)
    return made
