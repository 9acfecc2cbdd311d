"""Keras 2 (tf_keras), which tf.keras is with TF_USE_LEGACY_KERAS=1, on real ranks, against one process."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from hvdkit.errors import HorovodInternalError
from hvdkit.keras.keras_2 import velocities_of
from tests.keras.batches import (
    FEATURES,
    NOT_WRAPPED,
    ROWS,
    batches,
    check_a_metric_of_several_values,
    check_reading_changes_nothing,
    joined,
    train,
)
from tests.keras.unknown_lengths import check_the_end_is_no_pass
from tests.ranks import Skip
from tests.tensorflow.translated import ours as hvdkits
from tests.tensorflow.translated import translated
from tests.told import told, warned

keras = tf.keras


def optimizers() -> dict[str, Any]:
    """Every optimizer of Keras 2, of both kinds, by name."""
    modules = {"": keras.optimizers, "legacy.": keras.optimizers.legacy}
    found = {
        f"{prefix}{name}": kind
        for prefix, module in modules.items()
        for name, kind in vars(module).items()
        if isinstance(kind, type) and issubclass(kind, module.Optimizer) and kind is not module.Optimizer
    }
    assert len(found) >= 18, found
    return found


def compiled(optimizer: Any, seed: int = 1, **options: Any) -> Any:
    """Two layers with an optimizer; the same weights for the same seed."""
    keras.utils.set_random_seed(seed)
    made = keras.Sequential(
        [
            keras.layers.Input((FEATURES,), dtype="float64"),
            keras.layers.Dense(8, activation="tanh", dtype="float64"),
            keras.layers.Dense(1, activation="sigmoid", dtype="float64"),
        ]
    )
    made.compile(optimizer=optimizer, loss="mse", **options)
    return made


def check_same_bits(hvd: Any, made: Any) -> None:
    """All ranks hold the same."""
    mine = b"".join(variable.numpy().tobytes() for variable in made.variables)
    assert len(set(hvd.allgather_object(mine))) == 1


def check_close(made: Any, other: Any, rtol: float = 1e-5) -> None:
    """The same weights but for rounding."""
    for variable, expected in zip(made.variables, other.variables, strict=True):
        np.testing.assert_allclose(variable.numpy(), expected.numpy(), rtol, rtol / 100)


def case_a_callback_of_keras_3_refuses_a_model_of_keras_2(hvd: Any) -> None:
    from hvdkit.keras.callbacks import MetricAverageCallback

    made = compiled(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    x, y = (np.concatenate(part) for part in zip(*batches(hvd.rank(), 2), strict=True))
    with told(TypeError) as caught:
        made.fit(x, y, verbose=0, callbacks=[MetricAverageCallback()])
    assert str(caught.value) == (
        "MetricAverageCallback is a callback of Keras 3 here, and the model is one of Keras 2 (tf_keras).\n"
        "HINT: import hvdkit.tensorflow.keras as hvd, whose callbacks are for models of tf.keras, and set "
        "TF_USE_LEGACY_KERAS=1 before TensorFlow is imported, so that tf.keras is tf_keras."
    )


def case_it_is_keras_2(hvd: Any) -> None:
    assert tf.keras.Model.__module__.startswith("tf_keras.")
    assert issubclass(hvd.callbacks.MetricAverageCallback, keras.callbacks.Callback)


def case_every_optimizer_trains_as_one_process_does(hvd: Any) -> None:
    for name, kind in optimizers().items():
        ours = compiled(hvd.DistributedOptimizer(kind(learning_rate=0.01)), run_eagerly=True)
        train(ours, batches(hvd.rank()))
        assert type(ours.optimizer).__name__ == kind.__name__, name
        assert isinstance(ours.optimizer, kind), name
        check_same_bits(hvd, ours)
        check_close(ours, train(compiled(kind(learning_rate=0.01), run_eagerly=True), joined(hvd)))


def of_both_kinds() -> list[Callable[[], Any]]:
    """Makers of an optimizer of Keras 2.11 and later, and of an older one."""
    return [lambda: keras.optimizers.Adam(0.01), lambda: keras.optimizers.legacy.Adam(0.01)]


def case_fit_trains_all_ranks_alike(hvd: Any) -> None:
    for new in of_both_kinds():
        ours = compiled(hvd.DistributedOptimizer(new()), seed=hvd.rank())
        x, y = (np.concatenate(part) for part in zip(*batches(hvd.rank(), 4), strict=True))
        first = compiled(new(), seed=0).get_weights()
        history = ours.fit(
            x,
            y,
            batch_size=ROWS,
            epochs=2,
            shuffle=False,
            verbose=0,
            callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()],
        )
        check_same_bits(hvd, ours)
        alone = compiled(new())
        alone.set_weights(first)
        for _ in range(2):
            train(alone, joined(hvd, 4))
        check_close(ours, alone)
        assert len({tuple(losses) for losses in hvd.allgather_object(history.history["loss"])}) == 1


def case_a_loop_of_ones_own_in_a_graph(hvd: Any) -> None:
    for new in of_both_kinds():
        optimizer = hvd.DistributedOptimizer(new())
        ours = compiled(new())

        @tf.function
        def step(x: Any, y: Any, optimizer: Any = optimizer, ours: Any = ours) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(ours(x) - y))
            gradients = tape.gradient(loss, ours.trainable_variables)
            return optimizer.apply_gradients(zip(gradients, ours.trainable_variables, strict=True))

        with translated() as names:
            for x, y in batches(hvd.rank()):
                step(tf.constant(x), tf.constant(y))
        assert hvdkits(names) == []
        assert int(optimizer.iterations) == 3
        check_same_bits(hvd, ours)
        check_close(ours, train(compiled(new()), joined(hvd)))


def case_several_passes_make_a_step(hvd: Any) -> None:
    for new in of_both_kinds():
        for options in ({}, {"run_eagerly": True}):
            wrapped = hvd.DistributedOptimizer(new(), backward_passes_per_step=2, average_aggregated_gradients=True)
            data = [batch for batch in batches(hvd.rank(), 2) for _ in range(2)]
            ours = train(compiled(wrapped, **options), data)
            assert int(ours.optimizer.iterations) == 2
            check_same_bits(hvd, ours)
            check_close(ours, train(compiled(new()), joined(hvd, 2)))


def case_the_end_of_data_of_unknown_length_is_no_pass(hvd: Any) -> None:
    for new, passes in zip(of_both_kinds(), (1, 3), strict=True):
        check_the_end_is_no_pass(hvd, keras, new, passes)


def case_a_metric_of_several_values_is_averaged_by_fit(hvd: Any) -> None:
    check_a_metric_of_several_values(hvd, keras)


def case_reading_attributes_on_one_rank_changes_nothing(hvd: Any) -> None:
    for new in of_both_kinds():
        check_reading_changes_nothing(hvd, lambda new=new: compiled(hvd.DistributedOptimizer(new()), run_eagerly=True))


def case_a_loss_scale_inside_or_around(hvd: Any) -> None:
    scaled = keras.mixed_precision.LossScaleOptimizer
    for new in of_both_kinds():
        for wrap in (
            lambda one: hvd.DistributedOptimizer(scaled(one, initial_scale=8.0, dynamic_growth_steps=2)),
            lambda one: scaled(hvd.DistributedOptimizer(one), initial_scale=8.0, dynamic_growth_steps=2),
        ):
            ours = train(compiled(wrap(new())), batches(hvd.rank()))
            check_close(ours, train(compiled(new()), joined(hvd)))
            before = ours.get_weights()
            x, y = batches(hvd.rank())[0]
            if hvd.rank() == hvd.size() - 1:
                x = x * np.nan
            ours.train_on_batch(x, y)  # not finite on one rank: all skip the step
            for value, other in zip(ours.get_weights(), before, strict=True):
                np.testing.assert_array_equal(value, other)
            check_same_bits(hvd, ours)


def case_saved_models_load_with_and_without_hvdkit(hvd: Any) -> None:
    new, old = of_both_kinds()
    for make, ending in ((new, ".h5"), (new, ".keras"), (old, ".h5")):  # Keras saves no state of old ones in .keras
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder, f"model{ending}"))
            ours = train(compiled(hvd.DistributedOptimizer(make())), batches(hvd.rank()))
            ours.save(path)
            loaded = hvd.load_model(path)
            train(ours, batches(hvd.rank()))
            train(loaded, batches(hvd.rank()))
            check_close(loaded, ours)
            check_same_bits(hvd, loaded)
            plain = keras.models.load_model(path)
            assert type(plain.optimizer).__mro__ == type(make()).__mro__
            with warned(NOT_WRAPPED, times=int(hvd.size() > 1)):
                train(plain, batches(hvd.rank()))


@keras.saving.register_keras_serializable(package="hvdkit_tests")
class Registered(keras.optimizers.SGD):
    """Somebody's optimizer, registered."""


def case_registered_classes_keep_their_names(hvd: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "model.h5"))
        train(compiled(hvd.DistributedOptimizer(Registered(0.1))), batches(hvd.rank())).save(path)
        assert type(keras.models.load_model(path).optimizer) is Registered
        assert isinstance(hvd.load_model(path, None, None, hvd.Compression.fp16).optimizer, Registered)


def case_a_model_that_one_rank_loaded_is_given_to_all(hvd: Any) -> None:
    for new in of_both_kinds():
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder, "model.h5"))
            if hvd.rank() == 0:
                train(compiled(new(), seed=7), batches(0)).save(path)
                ours = hvd.load_model(path)
            else:
                ours = compiled(hvd.DistributedOptimizer(new()))
            x, y = batches(hvd.rank(), 1)[0]
            ours.fit(x, y, verbose=0, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
            check_same_bits(hvd, ours)
            hvd.broadcast_global_variables(0, ours)


def case_gradients_that_are_summed_before_are_not_summed_again(hvd: Any) -> None:
    kinds = (
        (keras.optimizers.SGD, "aggregate_gradients", {"skip_gradients_aggregation": True}),
        (keras.optimizers.legacy.SGD, "_aggregate_gradients", {"experimental_aggregate_gradients": False}),
    )
    mean = (hvd.size() + 1) / 2
    for kind, name, options in kinds:
        optimizer = hvd.DistributedOptimizer(kind(1.0))
        variable = tf.Variable(np.zeros(2), name="weight")
        pairs = [(tf.constant([1.0, 2.0], tf.float64) * (hvd.rank() + 1), variable)]
        with warned("summed already", 1):
            optimizer.apply_gradients(pairs, **options)
        variable.assign(np.zeros(2))
        [(gradient, _)] = getattr(optimizer, name)(pairs)
        np.testing.assert_allclose(gradient, [mean, 2 * mean])
        with warned("summed already", 0):
            optimizer.apply_gradients([(tf.clip_by_value(gradient, 0.0, 1.25), variable)], **options)
        np.testing.assert_allclose(variable.numpy(), [-min(mean, 1.25), -1.25])


def case_a_velocity_follows_the_learning_rate(hvd: Any) -> None:
    for kind in (keras.optimizers.SGD, keras.optimizers.legacy.SGD):
        made = train(compiled(hvd.DistributedOptimizer(kind(1.0, momentum=0.5))), batches(hvd.rank(), 1))
        before = [velocity.numpy() for velocity in velocities_of(made.optimizer, made.trainable_variables)]
        assert len(before) == 4
        schedule = hvd.callbacks.LearningRateScheduleCallback(1.0, lambda epoch: 0.25)
        schedule.set_model(made)
        schedule.on_train_batch_begin(0)
        for velocity, old in zip(velocities_of(made.optimizer, made.trainable_variables), before, strict=True):
            np.testing.assert_allclose(velocity.numpy(), 0.25 * old)


def case_mixed_precision_scales_the_loss_by_itself(hvd: Any) -> None:
    for new in of_both_kinds():
        keras.mixed_precision.set_global_policy("mixed_float16")
        try:
            made = keras.Sequential([keras.layers.Input((FEATURES,)), keras.layers.Dense(1)])
            made.compile(optimizer=hvd.DistributedOptimizer(new()), loss="mse")
        finally:
            keras.mixed_precision.set_global_policy("float32")
        assert "LossScale" in type(made.optimizer).__name__
        before = made.get_weights()
        train(made, batches(hvd.rank()))
        check_same_bits(hvd, made)
        assert any(np.any(value != other) for value, other in zip(made.get_weights(), before, strict=True))


def case_nobody_trains_unsynchronised_in_silence(hvd: Any) -> None:
    import hvdkit.tensorflow

    for new in of_both_kinds():
        times = int(hvd.size() > 1)
        with warned(NOT_WRAPPED, times):
            made = train(compiled(new()), batches(hvd.rank()))
        with warned(NOT_WRAPPED, 0):
            train(compiled(hvd.DistributedOptimizer(new())), batches(hvd.rank()))
        x = tf.constant(batches(hvd.rank())[0][0])
        with warned(NOT_WRAPPED, 0), tf.GradientTape() as tape:
            loss = tf.reduce_sum(made(x))
        gradients = hvdkit.tensorflow.DistributedGradientTape(tape).gradient(loss, made.trainable_variables)
        with warned(NOT_WRAPPED, 0):
            new().apply_gradients(zip(gradients, made.trainable_variables, strict=True))


def case_local_layers_stay_local(hvd: Any) -> None:
    for new in of_both_kinds():
        ours = compiled("sgd")
        local, shared = ours.layers
        wrapped = hvd.PartialDistributedOptimizer(new(), local_layers=local)
        ours.compile(optimizer=wrapped, loss="mse")
        train(ours, batches(hvd.rank()))
        alike = [len(set(hvd.allgather_object(layer.kernel.numpy().tobytes()))) for layer in (local, shared)]
        assert alike == [hvd.size(), 1]


def case_learning_rates_warm_up(hvd: Any) -> None:
    for new in of_both_kinds():
        ours = compiled(hvd.DistributedOptimizer(new()))
        x, y = (np.concatenate(part) for part in zip(*batches(hvd.rank(), 2), strict=True))
        warm_up = hvd.callbacks.LearningRateWarmupCallback(0.8, warmup_epochs=2)
        history = ours.fit(x, y, batch_size=ROWS, epochs=2, verbose=0, callbacks=[warm_up])
        size = hvd.size()
        np.testing.assert_allclose(history.history["lr"], [0.8 / size * ((size - 1) / 2 + 1), 0.8], rtol=1e-5)


def case_ranks_with_other_models_are_told_which_variable(hvd: Any) -> None:
    if hvd.size() == 1:
        raise Skip("needs other ranks")
    made = keras.Sequential([keras.layers.Input((FEATURES,)), keras.layers.Dense(hvd.rank() + 1, name="lopsided")])
    made.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
    with told(HorovodInternalError, "lopsided"):
        made.train_on_batch(np.ones((ROWS, FEATURES)), np.ones((ROWS, 1)))
