"""Checks for Keras 3 and Keras 2 alike: ``keras`` and ``compiled``, which makes a small model, are either's."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.keras.batches import FEATURES, ROWS, batches, check_close, check_same_bits, joined, train, whole
from tests.told import warned

NOT_WRAPPED = "with gradients of rank"
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
    made = penalised(keras, optimizer, **options)
    made.fit(of_unknown_length(batches(hvd.rank(), BATCHES)), epochs=EPOCHS, verbose=0)
    alone, data = penalised(keras, new()), joined(hvd, BATCHES) * EPOCHS
    for start in range(0, len(data), passes):
        alone.train_on_batch(*whole(data[start : start + passes]))
    assert int(made.optimizer.iterations) == int(alone.optimizer.iterations) == len(data) // passes
    check_close(made, alone, 1e-6, 1e-6)
    check_same_bits(hvd, made)


def check_every_optimizer(hvd: Any, optimizers: dict[str, Any], compiled: Callable[..., Any]) -> None:
    """Check that steps of each optimizer, by name, are those of one process. Eager, to be quick."""
    for name, new in optimizers.items():
        # Muon cannot do float64.
        options, rtol = ({"dtype": "float32"}, 1e-3) if name == "Muon" else ({}, 1e-5)
        made = train(compiled(hvd.DistributedOptimizer(new()), run_eagerly=True, **options), batches(hvd.rank()))
        assert type(made.optimizer).__name__ == type(new()).__name__, name
        assert isinstance(made.optimizer, type(new())), name
        check_same_bits(hvd, made)
        alone = train(compiled(new(), run_eagerly=True, **options), joined(hvd))
        check_close(made, alone, rtol, rtol / 100)


def check_fit(hvd: Any, new: Callable[[], Any], compiled: Callable[..., Any], **options: Any) -> None:
    """Check that ``fit`` with the callbacks gives what one process gets from rank 0's first weights."""
    made = compiled(hvd.DistributedOptimizer(new()), seed=hvd.rank(), **options)
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
    settings = {"batch_size": ROWS, "epochs": 2, "shuffle": False, "verbose": 0, "callbacks": callbacks}
    history = made.fit(*whole(batches(hvd.rank(), 4)), **settings)
    check_same_bits(hvd, made)
    alone = compiled(new(), seed=0)
    for _ in range(2):
        train(alone, joined(hvd, 4))
    check_close(made, alone)
    assert len({tuple(losses) for losses in hvd.allgather_object(history.history["loss"])}) == 1


def check_a_loss_scale(hvd: Any, new: Callable[[], Any], compiled: Callable[..., Any], scaled: Any) -> None:
    """Check a loss scale inside and around a distributed optimizer; a rank without finite gradients stops all."""
    scale = {"initial_scale": 8.0, "dynamic_growth_steps": 2}
    for wrap in (
        lambda inner: hvd.DistributedOptimizer(scaled(inner, **scale)),
        lambda inner: scaled(hvd.DistributedOptimizer(inner), **scale),
    ):
        made = train(compiled(wrap(new())), batches(hvd.rank()))
        check_close(made, train(compiled(new()), joined(hvd)))
        before = made.get_weights()
        x, y = batches(hvd.rank())[0]
        made.train_on_batch(x * np.nan if hvd.rank() == hvd.size() - 1 else x, y)
        for value, other in zip(made.get_weights(), before, strict=True):
            np.testing.assert_array_equal(value, other)
        train(made, batches(hvd.rank()))
        check_same_bits(hvd, made)


def check_mixed_precision(hvd: Any, optimizer: Any, set_policy: Callable[[str], None], compiled: Any) -> None:
    """Check that ``compile`` scales the loss by itself where the policy is mixed, and that ranks stay alike."""
    set_policy("mixed_float16")
    try:
        made = compiled(hvd.DistributedOptimizer(optimizer), dtype="mixed_float16")
    finally:
        set_policy("float32")
    assert "LossScale" in type(made.optimizer).__name__
    before = made.get_weights()
    train(made, batches(hvd.rank()))
    check_same_bits(hvd, made)
    assert all(np.any(value != other) for value, other in zip(made.get_weights(), before, strict=True))


def check_saved_models(hvd: Any, keras: Any, new: Callable[[], Any], compiled: Any, ending: str = ".keras") -> None:
    """Check that a saved model goes on with ``hvd.load_model``, and loads as a plain one without hvdkit."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, f"model{ending}"))
        made = train(compiled(hvd.DistributedOptimizer(new())), batches(hvd.rank()))
        made.save(path)
        loaded = hvd.load_model(path, compression=hvd.Compression.none)
        train(made, batches(hvd.rank()))
        train(loaded, batches(hvd.rank()))
        check_close(loaded, made)
        check_same_bits(hvd, loaded)
        plain = keras.models.load_model(path)
        assert type(plain.optimizer).__mro__ == type(new()).__mro__
        with warned(NOT_WRAPPED, times=int(hvd.size() > 1)):
            train(plain, batches(hvd.rank()))


def check_a_model_that_one_rank_loaded(hvd: Any, new: Callable[[], Any], compiled: Any, ending: str) -> None:
    """Check that the callback gives the model and optimizer that rank 0 has loaded to all ranks."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, f"model{ending}"))
        if hvd.rank() == 0:
            train(compiled(new(), seed=7), batches(0)).save(path)
            made = hvd.load_model(path)
        else:
            [compiled(new()) for _ in range(2)]  # which Keras counts in the names of layers
            made = compiled(hvd.DistributedOptimizer(new()))
        made.fit(*batches(hvd.rank(), 1)[0], verbose=0, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
        check_same_bits(hvd, made)
        assert int(made.optimizer.iterations) == 4


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
