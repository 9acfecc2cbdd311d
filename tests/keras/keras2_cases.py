"""Keras 2 (tf_keras), which tf.keras is with TF_USE_LEGACY_KERAS=1, on real ranks, against one process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from hvdkit.keras.keras_2 import velocities_of
from tests.keras import both
from tests.keras.batches import ROWS, batches, check_close, check_same_bits, dense_layers, joined, train, whole
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


def compiled(optimizer: Any, seed: int = 1, dtype: str = "float64", **options: Any) -> Any:
    """Two layers with an optimizer; the same weights for the same seed."""
    made = dense_layers(keras, seed, dtype)
    made.compile(optimizer=optimizer, loss="mse", **options)
    return made


def case_a_callback_of_keras_3_refuses_a_model_of_keras_2(hvd: Any) -> None:
    from hvdkit.keras.callbacks import MetricAverageCallback

    made = compiled(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    with told(TypeError, "callback of Keras 3", "Keras 2 (tf_keras)", "HINT: import hvdkit.tensorflow.keras as hvd"):
        made.fit(*whole(batches(hvd.rank(), 2)), verbose=0, callbacks=[MetricAverageCallback()])


def case_it_is_keras_2(hvd: Any) -> None:
    assert tf.keras.Model.__module__.startswith("tf_keras.")
    assert issubclass(hvd.callbacks.MetricAverageCallback, keras.callbacks.Callback)


def case_every_optimizer_trains_as_one_process_does(hvd: Any) -> None:
    makers = {name: functools.partial(kind, learning_rate=0.01) for name, kind in optimizers().items()}
    both.check_every_optimizer(hvd, makers, compiled)


def of_both_kinds() -> list[Callable[[], Any]]:
    """Makers of an optimizer of Keras 2.11 and later, and of an older one."""
    return [lambda: keras.optimizers.Adam(0.01), lambda: keras.optimizers.legacy.Adam(0.01)]


def case_fit_trains_all_ranks_alike(hvd: Any) -> None:
    for new in of_both_kinds():
        both.check_fit(hvd, new, compiled)


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

        for x, y in batches(hvd.rank()):
            step(tf.constant(x), tf.constant(y))
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
        both.check_the_end_is_no_pass(hvd, keras, new, passes)


def case_a_metric_of_several_values_is_averaged_by_fit(hvd: Any) -> None:
    both.check_a_metric_of_several_values(hvd, keras)


def case_a_loss_scale_inside_or_around(hvd: Any) -> None:
    for new in of_both_kinds():
        both.check_a_loss_scale(hvd, new, compiled, keras.mixed_precision.LossScaleOptimizer)


def case_saved_models_load_with_and_without_hvdkit(hvd: Any) -> None:
    new, old = of_both_kinds()
    for make, ending in ((new, ".h5"), (new, ".keras"), (old, ".h5")):  # Keras saves no state of old ones in .keras
        both.check_saved_models(hvd, keras, make, compiled, ending)


def case_a_model_that_one_rank_loaded_is_given_to_all(hvd: Any) -> None:
    for new in of_both_kinds():
        both.check_a_model_that_one_rank_loaded(hvd, new, compiled, ".h5")


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
        both.check_mixed_precision(hvd, new(), keras.mixed_precision.set_global_policy, compiled)


def case_nobody_trains_unsynchronised_in_silence(hvd: Any) -> None:
    import hvdkit.tensorflow

    for new in of_both_kinds():
        times = int(hvd.size() > 1)
        with warned(both.NOT_WRAPPED, times):
            made = train(compiled(new()), batches(hvd.rank()))
        with warned(both.NOT_WRAPPED, 0):
            train(compiled(hvd.DistributedOptimizer(new())), batches(hvd.rank()))
        x = tf.constant(batches(hvd.rank())[0][0])
        with warned(both.NOT_WRAPPED, 0), tf.GradientTape() as tape:
            loss = tf.reduce_sum(made(x))
        gradients = hvdkit.tensorflow.DistributedGradientTape(tape).gradient(loss, made.trainable_variables)
        with warned(both.NOT_WRAPPED, 0):
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
        warm_up = hvd.callbacks.LearningRateWarmupCallback(0.8, warmup_epochs=2)
        history = ours.fit(*whole(batches(hvd.rank(), 2)), batch_size=ROWS, epochs=2, verbose=0, callbacks=[warm_up])
        size = hvd.size()
        np.testing.assert_allclose(history.history["lr"], [0.8 / size * ((size - 1) / 2 + 1), 0.8], rtol=1e-5)
