"""Keras 3, on both of its backends, and Keras 2, whose optimizers are of two kinds, against one process."""

from __future__ import annotations

import functools
import inspect
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from hvdkit.errors import HorovodInternalError
from tests.keras.batches import FEATURES, NOT_WRAPPED, ROWS, batches, joined, whole
from tests.keras.checks import check_close, check_equal, check_same_bits, numbers, only_tensorflow, only_with_others
from tests.keras.models import IS_KERAS_2, TENSORFLOW, compiled, gradients_of, keras, model, steps_of_one_process, train
from tests.told import told, warned

BATCHES, EPOCHS = 4, 3
MODULES = {"": keras.optimizers, **({"legacy.": keras.optimizers.legacy} if IS_KERAS_2 else {})}
LossScale = keras.mixed_precision.LossScaleOptimizer if IS_KERAS_2 else keras.optimizers.LossScaleOptimizer


def of_each_kind(name: str, *arguments: Any, **options: Any) -> list[Callable[[], Any]]:
    """Return makers of an optimizer: of Keras 3, or of Keras 2.11 and later and of an older one."""
    return [functools.partial(getattr(module, name), *arguments, **options) for module in MODULES.values()]


ADAMS, SGDS = of_each_kind("Adam", 0.01), of_each_kind("SGD", 0.1)


def optimizers() -> dict[str, Callable[[], Any]]:
    found = {
        f"{prefix}{name}": functools.partial(kind, learning_rate=0.01)
        for prefix, module in MODULES.items()
        for name, kind in vars(module).items()
        if isinstance(kind, type) and issubclass(kind, module.Optimizer) and kind not in (module.Optimizer, LossScale)
    }
    assert len(found) >= (18 if IS_KERAS_2 else 11), found
    if several := found.get("MultiOptimizer"):
        found["MultiOptimizer"] = functools.partial(
            several.func, lambda variable: keras.optimizers.SGD(0.1 if "kernel" in variable.path else 0.01)
        )
    return found


def case_every_optimizer_trains_as_one_process_does(hvd):
    for name, new in optimizers().items():
        # Muon cannot do float64. Eager, to be quick; other cases are in graphs.
        options, rtol = ({"dtype": "float32"}, 1e-3) if name == "Muon" else ({}, 1e-5)
        made = train(compiled(hvd.DistributedOptimizer(new()), run_eagerly=True, **options), batches(hvd.rank()))
        assert type(made.optimizer).__name__ == new.func.__name__, name
        assert isinstance(made.optimizer, new.func), name
        check_same_bits(hvd, made)
        check_close(made, train(compiled(new(), run_eagerly=True, **options), joined(hvd)), rtol, rtol / 100)


def case_fit_trains_all_ranks_alike(hvd):
    ways = [{}] if IS_KERAS_2 else [{}, {"run_eagerly": True}, {"steps_per_execution": 2 if TENSORFLOW else 1}]
    for new in ADAMS:
        for options in ways:
            made = compiled(hvd.DistributedOptimizer(new()), seed=hvd.rank(), **options)
            callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
            settings = {"batch_size": ROWS, "epochs": 2, "shuffle": False, "verbose": 0, "callbacks": callbacks}
            history = made.fit(*whole(batches(hvd.rank(), 4)), **settings)
            check_same_bits(hvd, made)
            check_close(made, train(compiled(new(), seed=0), joined(hvd, 4) * 2))
            assert len({tuple(losses) for losses in hvd.allgather_object(history.history["loss"])}) == 1


def case_a_loop_of_ones_own_in_a_graph(hvd):
    only_tensorflow()
    import tensorflow as tf

    from tests.tensorflow.data import left_as_written

    for new in ADAMS:
        for way in ("apply_gradients",) if IS_KERAS_2 else ("apply", "apply_gradients"):
            looped, optimizer = compiled(new()), hvd.DistributedOptimizer(new())

            @tf.function
            def step(x, y, way=way, looped=looped, optimizer=optimizer):
                pairs = list(zip(gradients_of(looped, x, y), looped.trainable_variables, strict=True))
                if way == "apply":
                    optimizer.apply(*zip(*pairs, strict=True))
                else:
                    optimizer.apply_gradients(pairs)

            with left_as_written():
                for x, y in batches(hvd.rank()):
                    step(tf.constant(x), tf.constant(y))
            assert int(optimizer.iterations) == 3
            check_same_bits(hvd, looped)
            check_close(looped, steps_of_one_process(new(), hvd))


def of_unknown_length(data: Sequence[tuple[Any, ...]]) -> Any:
    """The batches as a tf.data.Dataset that does not know how many there are."""
    import tensorflow as tf

    signature = tuple(tf.TensorSpec((None, *part.shape[1:]), part.dtype) for part in data[0])
    return tf.data.Dataset.from_generator(lambda: iter(data), output_signature=signature)


def penalised(optimizer: Any) -> Any:
    """A model that has a weight of which the gradient does not depend on the data."""
    import tensorflow as tf

    class Penalty(keras.layers.Layer):
        def build(self, shape):
            self.weight = self.add_weight(name="weight", shape=(3,), initializer="ones")

        def call(self, x):
            self.add_loss(tf.cast(tf.reduce_sum(tf.square(tf.convert_to_tensor(self.weight))), tf.float32))
            return x

    keras.utils.set_random_seed(1)
    hidden, last = (keras.layers.Dense(width, dtype="float64") for width in (8, 1))
    made = keras.Sequential([keras.layers.Input((FEATURES,), dtype="float64"), hidden, last, Penalty(dtype="float64")])
    made.compile(optimizer=optimizer, loss="mse")
    return made


def case_the_end_of_data_of_unknown_length_is_no_pass(hvd):
    only_tensorflow()
    makers = ADAMS if IS_KERAS_2 else [lambda: LossScale(ADAMS[0](), initial_scale=8.0), *ADAMS]
    for new, passes in zip(makers, (1, 3), strict=True):
        optimizer = hvd.DistributedOptimizer(new(), backward_passes_per_step=passes, average_aggregated_gradients=True)
        made = penalised(optimizer)
        made.fit(of_unknown_length(batches(hvd.rank(), BATCHES)), epochs=EPOCHS, verbose=0)
        alone, data = penalised(new()), joined(hvd, BATCHES) * EPOCHS
        train(alone, [whole(data[start : start + passes]) for start in range(0, len(data), passes)])
        assert int(made.optimizer.iterations) == int(alone.optimizer.iterations) == len(data) // passes
        check_close(made, alone, 1e-6, 1e-6)
        check_same_bits(hvd, made)


def case_a_loss_scale_inside_or_around(hvd):
    scale = {"initial_scale": 8.0, "dynamic_growth_steps": 2}
    for new in ADAMS:
        for wrap in (
            lambda inner: hvd.DistributedOptimizer(LossScale(inner, **scale)),
            lambda inner: LossScale(hvd.DistributedOptimizer(inner), **scale),
        ):
            made = train(compiled(wrap(new())), batches(hvd.rank()))
            check_close(made, steps_of_one_process(new(), hvd))
            before = numbers(made.variables)
            x, y = batches(hvd.rank())[0]
            made.train_on_batch(x * np.nan if hvd.rank() == hvd.size() - 1 else x, y)  # all ranks skip the step
            check_equal(numbers(made.variables), before)
            train(made, batches(hvd.rank()))
            check_same_bits(hvd, made)


def case_mixed_precision_scales_the_loss_by_itself(hvd):
    set_policy = keras.mixed_precision.set_global_policy if IS_KERAS_2 else keras.config.set_dtype_policy
    for new in ADAMS if IS_KERAS_2 else SGDS:
        set_policy("mixed_float16")
        try:
            made = compiled(hvd.DistributedOptimizer(new()), dtype="mixed_float16")
        finally:
            set_policy("float32")
        assert "LossScale" in type(made.optimizer).__name__
        before = numbers(made.trainable_variables)
        train(made, batches(hvd.rank()))
        check_same_bits(hvd, made)
        assert all(np.any(value != old) for value, old in zip(numbers(made.trainable_variables), before, strict=True))


def case_saved_models_load_with_and_without_hvdkit(hvd):
    # Keras 2 saves no state of old optimizers in .keras.
    kinds = [(ADAMS[0], ".h5"), (ADAMS[0], ".keras"), (ADAMS[-1], ".h5")]
    if not IS_KERAS_2:
        kinds = [(of_each_kind(name, 0.01)[0], ".keras") for name in ("Adam", "SGD", "Adafactor")]
    for new, ending in kinds:
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder, f"model{ending}"))
            made = train(compiled(hvd.DistributedOptimizer(new())), batches(hvd.rank()))
            made.save(path)
            loaded = hvd.load_model(path, **({} if IS_KERAS_2 else {"compression": hvd.Compression.none}))
            if not IS_KERAS_2:
                check_equal(numbers(loaded.optimizer.variables), numbers(made.optimizer.variables))
            train(made, batches(hvd.rank()))
            train(loaded, batches(hvd.rank()))
            check_close(loaded, made)
            check_same_bits(hvd, loaded)
            plain = keras.models.load_model(path)
            assert type(plain.optimizer).__mro__ == type(new()).__mro__
            with warned(NOT_WRAPPED, times=int(hvd.size() > 1)):
                train(plain, batches(hvd.rank()))


def case_a_model_that_one_rank_loaded_is_given_to_all(hvd):
    for new in ADAMS:
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder, "model.h5" if IS_KERAS_2 else "model.keras"))
            if hvd.rank() == 0:
                train(compiled(new(), seed=7), batches(0)).save(path)
                made = hvd.load_model(path)
            else:
                [model() for _ in range(2)]  # which Keras counts in the names of layers
                made = compiled(hvd.DistributedOptimizer(new()))
            callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
            made.fit(*batches(hvd.rank(), 1)[0], verbose=0, callbacks=callbacks)
            check_same_bits(hvd, made)
            assert int(made.optimizer.iterations) == 4
            hvd.broadcast_global_variables(0, made)


def case_reading_attributes_on_one_rank_changes_nothing(hvd):
    makers = [lambda new=new: hvd.DistributedOptimizer(new()) for new in ADAMS]
    if not IS_KERAS_2:
        makers = [
            lambda: hvd.DistributedOptimizer(ADAMS[0](), backward_passes_per_step=2),
            lambda: hvd.DistributedOptimizer(LossScale(ADAMS[0]())),
            lambda: LossScale(hvd.DistributedOptimizer(ADAMS[0]())),
        ]
    for make in makers:
        ends = []
        for reads in (False, True):
            made = compiled(make(), run_eagerly=True)
            for x, y in batches(hvd.rank(), 4):
                if reads and hvd.rank() == 0:
                    before = dict(vars(made.optimizer))
                    inspect.getmembers(made.optimizer)
                    hasattr(made.optimizer, "_step_supports_amp_scaling")
                    mock.create_autospec(made.optimizer)
                    repr(made.optimizer)
                    assert vars(made.optimizer).keys() == before.keys()
                made.train_on_batch(x, y)
            ends.append(made.get_weights())
        check_equal(*ends)
        check_same_bits(hvd, made)


def case_nobody_trains_unsynchronised_in_silence(hvd):
    for new in ADAMS:
        with warned(NOT_WRAPPED, int(hvd.size() > 1)):
            made = train(compiled(new()), batches(hvd.rank()))
        with warned(NOT_WRAPPED, 0):
            train(compiled(hvd.DistributedOptimizer(new())), batches(hvd.rank()))
        if TENSORFLOW:
            import tensorflow as tf

            import hvdkit.tensorflow

            with warned(NOT_WRAPPED, 0):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum(made(tf.constant(batches(hvd.rank())[0][0])))
                gradients = hvdkit.tensorflow.DistributedGradientTape(tape).gradient(loss, made.trainable_variables)
                new().apply_gradients(zip(gradients, made.trainable_variables, strict=True))


def case_local_layers_stay_local(hvd):
    for new in SGDS:
        for scale in (False, True):
            made = model()
            local = {"local_layers": made.layers[0], "scale_local_gradients": scale}
            made.compile(optimizer=hvd.PartialDistributedOptimizer(new(), **local), loss="mse")
            train(made, batches(hvd.rank(), 1))
            rate = 0.1 / hvd.size() if scale else 0.1
            check_close(made.layers[0], train(compiled(new.func(rate)), batches(hvd.rank(), 1)).layers[0])
            check_close(made.layers[1], steps_of_one_process(new(), hvd, 1).layers[1])


def case_learning_rates_warm_up_and_fall(hvd):
    for new in of_each_kind("SGD", 0.8, momentum=0.5):
        rates = []

        class Rates(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None, rates=rates):
                rates.append(float(self.model.optimizer.learning_rate.numpy()))

        made = compiled(hvd.DistributedOptimizer(new()))
        callbacks = [
            hvd.callbacks.LearningRateWarmupCallback(0.8, warmup_epochs=2),
            hvd.callbacks.LearningRateScheduleCallback(0.8, lambda epoch: 0.1**epoch, start_epoch=2),
            Rates(),
        ]
        history = made.fit(*whole(batches(hvd.rank(), 2)), batch_size=ROWS, epochs=4, verbose=0, callbacks=callbacks)
        size = hvd.size()
        warm = [0.8 / size * ((step + 1) / 2 * (size - 1) / 2 + 1) for step in range(4)]
        np.testing.assert_allclose(rates, [*warm, 0.008, 0.008, 0.0008, 0.0008], rtol=1e-5)
        np.testing.assert_allclose(history.history["lr"], [warm[1], 0.8, 0.008, 0.0008], rtol=1e-5)
        check_same_bits(hvd, made)


def case_a_velocity_follows_the_learning_rate(hvd):
    def velocities(made):
        if IS_KERAS_2:
            from hvdkit.keras.keras_2 import velocities_of

            return numbers(velocities_of(made.optimizer, made.trainable_variables))
        return numbers(made.optimizer.momentums)

    for new in of_each_kind("SGD", 1.0, momentum=0.5):
        made = train(compiled(hvd.DistributedOptimizer(new())), batches(hvd.rank(), 1))
        before = velocities(made)
        assert len(before) == 4
        schedule = hvd.callbacks.LearningRateScheduleCallback(1.0, lambda epoch: 0.25)
        schedule.set_model(made)
        schedule.on_train_batch_begin(0)
        for value, old in zip(velocities(made), before, strict=True):
            np.testing.assert_allclose(value, 0.25 * old)


def case_a_metric_of_several_values_is_averaged_by_fit(hvd):
    class Kept(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.values = [np.array(logs[name]) for name in ("f1", "val_f1", "loss")]

    inputs, labels = batches(hvd.rank(), 1)[0][0], np.random.default_rng(hvd.rank()).integers(0, 3, ROWS)
    made = keras.Sequential([keras.layers.Input((FEATURES,)), keras.layers.Dense(3, activation="softmax")])
    metrics = [keras.metrics.F1Score(average=None, name="f1")]
    made.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "categorical_crossentropy", metrics=metrics)
    before, after = Kept(), Kept()
    data = inputs.astype(np.float32), np.eye(3, dtype=np.float32)[labels]
    callbacks = [before, hvd.callbacks.MetricAverageCallback(), after]
    history = made.fit(*data, verbose=0, validation_data=data, callbacks=callbacks)
    everyones = hvd.allgather_object(before.values)
    for index, name in enumerate(("f1", "val_f1", "loss")):
        expected = np.mean([values[index] for values in everyones], axis=0)
        assert expected.shape == (() if name == "loss" else (3,))
        np.testing.assert_allclose(after.values[index], expected, 1e-6)
        np.testing.assert_allclose(np.array(history.history[name][0]), expected, 1e-6)


def case_ranks_with_other_models_are_told_which_variable(hvd):
    only_with_others(hvd)
    keras.utils.set_random_seed(1)
    made = keras.Sequential([keras.layers.Input((FEATURES,)), keras.layers.Dense(hvd.rank() + 1, name="lopsided")])
    made.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
    with told(HorovodInternalError, "lopsided"):
        made.train_on_batch(np.ones((ROWS, FEATURES)), np.ones((ROWS, 1)))
