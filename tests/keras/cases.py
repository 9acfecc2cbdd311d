"""DistributedOptimizer, callbacks and saved models of Keras on real ranks, against one process on the joined batch."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from hvdkit.errors import HorovodInternalError
from tests.keras import both
from tests.keras.batches import (
    FEATURES,
    ROWS,
    batches,
    check_close,
    check_same_bits,
    dense_layers,
    joined,
    train,
    whole,
)
from tests.ranks import Skip
from tests.told import told, warned

TENSORFLOW = keras.backend.backend() == "tensorflow"


def only_tensorflow() -> None:
    if not TENSORFLOW:
        raise Skip("of the TensorFlow backend")


def only_with_others(hvd: Any) -> None:
    if hvd.size() == 1:
        raise Skip("needs other ranks")


def model(seed: int = 1, dtype: str = "float64") -> Any:
    """Two layers; the same weights for the same seed."""
    return dense_layers(keras, seed, dtype)


def compiled(optimizer: Any, seed: int = 1, dtype: str = "float64", **options: Any) -> Any:
    """The model with an optimizer."""
    made = model(seed, dtype)
    made.compile(optimizer=optimizer, loss=keras.losses.MeanSquaredError(), **options)
    return made


def numbers(variables: Sequence[Any]) -> list[Any]:
    """The values of variables."""
    return [keras.ops.convert_to_numpy(variable.value) for variable in variables]


def steps_of_one_process(optimizer: Any, hvd: Any, steps: int = 3) -> Any:
    """The model after one process took the steps, on all ranks' batches."""
    return train(compiled(optimizer), joined(hvd, steps))


def optimizers() -> dict[str, Any]:
    """Every optimizer of Keras, by name."""
    found = {
        name: kind
        for name, kind in vars(keras.optimizers).items()
        if isinstance(kind, type)
        and issubclass(kind, keras.optimizers.Optimizer)
        and kind not in (keras.optimizers.Optimizer, keras.optimizers.LossScaleOptimizer)
    }
    assert len(found) >= 11, found
    return found


def new(kind: Any) -> Any:
    """An optimizer of a class."""
    if kind.__name__ == "MultiOptimizer":
        return kind(lambda variable: keras.optimizers.SGD(0.1 if "kernel" in variable.path else 0.01))
    return kind(learning_rate=0.01)


def adam() -> Any:
    return keras.optimizers.Adam(0.01)


def case_every_optimizer_trains_as_one_process_does(hvd: Any) -> None:
    both.check_every_optimizer(
        hvd, {name: functools.partial(new, kind) for name, kind in optimizers().items()}, compiled
    )


def case_fit_trains_all_ranks_alike(hvd: Any) -> None:
    for options in ({}, {"run_eagerly": True}, {"steps_per_execution": 2 if TENSORFLOW else 1}):
        both.check_fit(hvd, adam, compiled, **options)


def case_a_train_step_of_ones_own_and_a_loop_of_ones_own(hvd: Any) -> None:
    class Own(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.inside = model()

        def call(self, x: Any) -> Any:
            return self.inside(x)

        def train_step(self, *arguments: Any) -> Any:
            return super().train_step(*arguments)

    ours = Own()
    ours.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
    train(ours, batches(hvd.rank()))
    alone = steps_of_one_process(keras.optimizers.SGD(0.1), hvd)
    check_close(ours.inside, alone)
    looped, optimizer = model(), hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    for x, y in batches(hvd.rank()):
        optimizer.apply_gradients(zip(gradients_of(looped, x, y), looped.trainable_variables, strict=True))
    check_close(looped, alone)


def case_a_loop_of_ones_own_in_a_graph(hvd: Any) -> None:
    only_tensorflow()
    import tensorflow as tf

    for way in ("apply", "apply_gradients"):
        looped, optimizer = model(), hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))

        @tf.function
        def step(x: Any, y: Any, way: str = way, looped: Any = looped, optimizer: Any = optimizer) -> None:
            pairs = list(zip(gradients_of(looped, x, y), looped.trainable_variables, strict=True))
            if way == "apply":
                optimizer.apply(*zip(*pairs, strict=True))
            else:
                optimizer.apply_gradients(pairs)

        for x, y in batches(hvd.rank()):
            step(tf.constant(x), tf.constant(y))
        check_close(looped, steps_of_one_process(keras.optimizers.SGD(0.1), hvd))


def gradients_of(made: Any, x: Any, y: Any) -> list[Any]:
    """Return the gradients of the mean square error, by the backend's own means."""
    if TENSORFLOW:
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(made(x) - y))
        found: list[Any] = tape.gradient(loss, made.trainable_variables)
        return found
    import torch

    loss = torch.mean(torch.square(made(torch.as_tensor(x)) - torch.as_tensor(y)))
    return list(torch.autograd.grad(loss, [variable.value for variable in made.trainable_variables]))


def case_sums_scales_groups_and_compression(hvd: Any) -> None:
    rate = 0.05
    for options, factor, rtol in (
        ({"op": hvd.Sum}, hvd.size(), 1e-5),
        ({"gradient_predivide_factor": 2.0}, 1, 1e-5),
        ({"groups": 2}, 1, 1e-5),
        ({"compression": hvd.Compression.fp16}, 1, 0.02),
        ({"compression": {"*kernel": hvd.Compression.int8(compress="everywhere")}}, 1, 0.02),
    ):
        ours = train(compiled(hvd.DistributedOptimizer(keras.optimizers.SGD(rate), **options)), batches(hvd.rank()))
        check_same_bits(hvd, ours)
        check_close(ours, steps_of_one_process(keras.optimizers.SGD(rate * factor), hvd), rtol, rtol / 10)


def case_patterns_choose_all_layers_of_a_kind(hvd: Any) -> None:
    only_with_others(hvd)

    def compressed_by(pattern: str, is_told: bool) -> set[str]:
        gc.collect()  # models of earlier cases, whose parameters would go from the statistics meanwhile
        before = set(hvd.compression_stats().by_parameter)
        layers = [keras.layers.Dense(64, name=f"kind_{number}") for number in (1, 2, 3)]
        made = keras.Sequential([keras.layers.Input((64,)), *layers, keras.layers.Dense(64, name="other")])
        policy = {pattern: hvd.Compression.int8(compress="everywhere")}
        made.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01), compression=policy), "mse")
        rows = np.random.default_rng(hvd.rank()).normal(size=(8, 64)).astype(np.float32)
        with warned("none of the patterns", times=int(is_told)):
            made.fit(rows, rows, batch_size=8, verbose=0)
        return set(hvd.compression_stats().by_parameter) - before

    for pattern, compressed in (("kind/kernel", 3), ("*kernel", 4), ("kind_2/kernel", 0)):
        found = compressed_by(pattern, compressed == 0 and hvd.rank() == 0)
        assert len(found) == compressed, (pattern, found)


def case_several_passes_make_a_step(hvd: Any) -> None:
    data = joined(hvd, 5)
    pairs = [whole(data[i : i + 2]) for i in (0, 2)]
    for wrapped, alone, options in (
        ({"average_aggregated_gradients": True}, keras.optimizers.SGD(0.1), {}),
        ({"average_aggregated_gradients": False}, keras.optimizers.SGD(0.2), {"run_eagerly": True}),
        ({"average_aggregated_gradients": True}, keras.optimizers.Adam(0.01, use_ema=True), {}),
    ):
        is_sgd = isinstance(alone, keras.optimizers.SGD)
        kind = keras.optimizers.SGD(0.1) if is_sgd else keras.optimizers.Adam(0.01, use_ema=True)
        optimizer = hvd.DistributedOptimizer(kind, backward_passes_per_step=2, **wrapped)
        ours = train(compiled(optimizer, **options), batches(hvd.rank(), 5))
        one = train(compiled(alone), pairs)
        check_close(one, ours)
        for mine, theirs in zip(numbers(optimizer.variables), numbers(alone.variables), strict=True):
            if mine.ndim:  # not the learning rates
                np.testing.assert_allclose(mine, theirs, 1e-5, 1e-7)
        assert count(optimizer) == 2  # of the fifth pass nothing was used yet
        check_same_bits(hvd, ours)


def count(optimizer: Any) -> int:
    """Return the number of an optimizer's updates."""
    return int(keras.ops.convert_to_numpy(optimizer.iterations))


def case_the_end_of_data_of_unknown_length_is_no_pass(hvd: Any) -> None:
    only_tensorflow()

    def scaled() -> Any:
        return keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01), initial_scale=8.0)

    both.check_the_end_is_no_pass(hvd, keras, lambda: keras.optimizers.Adam(0.01), 3)
    both.check_the_end_is_no_pass(hvd, keras, scaled, 1)


def case_what_had_a_gradient_in_one_of_several_passes_is_used_in_that_step(hvd: Any) -> None:
    variables = [keras.Variable(np.zeros(2), dtype="float64", name=name) for name in ("a", "b")]
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), backward_passes_per_step=2)
    one = keras.ops.ones(2, "float64") * (hvd.rank() + 1)
    mean = (hvd.size() + 1) / 2
    for gradients in ((one, one), (one, None), (one, None)):
        optimizer.apply(list(gradients), variables)
    optimizer.apply([one, None], variables)
    for value, factor in zip(numbers(variables), (-4, -1), strict=True):
        np.testing.assert_allclose(value, np.full(2, factor * mean))


def case_a_loss_scale_inside_or_around(hvd: Any) -> None:
    both.check_a_loss_scale(hvd, lambda: keras.optimizers.SGD(0.1), compiled, keras.optimizers.LossScaleOptimizer)


def case_mixed_precision_scales_the_loss_by_itself(hvd: Any) -> None:
    both.check_mixed_precision(hvd, keras.optimizers.SGD(0.1), keras.config.set_dtype_policy, compiled)


def case_values_that_replace_a_variable_are_the_largest_of_all(hvd: Any) -> None:
    weight = keras.Variable(np.zeros(2), dtype="float64", name="weight")
    scale = keras.Variable(np.zeros(2), dtype="float64", name="scale")
    scale.overwrite_with_gradient = True
    for passes in (1, 2):
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), op=hvd.Sum, backward_passes_per_step=passes)
        value = keras.ops.convert_to_tensor(np.array([1.0, -1.0]) * (hvd.rank() + 1))
        for _ in range(passes):
            optimizer.apply([value, value], [weight, scale])
        largest = [hvd.size(), -1.0 if passes == 1 else 0.0]  # as Keras, which begins with zero
        np.testing.assert_allclose(numbers([scale])[0], largest)


def case_saved_models_load_with_and_without_hvdkit(hvd: Any) -> None:
    for kind in (keras.optimizers.Adam, keras.optimizers.SGD, keras.optimizers.Adafactor):
        both.check_saved_models(hvd, keras, functools.partial(kind, 0.01), compiled)


@keras.saving.register_keras_serializable(package="hvdkit_tests")
class Registered(keras.optimizers.SGD):
    """Somebody's optimizer, registered."""


class Own(keras.optimizers.Optimizer):
    """Somebody's optimizer, with arguments and without get_config."""

    def __init__(self, rate: float) -> None:
        super().__init__(learning_rate=rate)

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        self.assign_sub(variable, keras.ops.cast(learning_rate, variable.dtype) * gradient)


def case_a_model_that_one_rank_loaded_is_given_to_all(hvd: Any) -> None:
    both.check_a_model_that_one_rank_loaded(hvd, adam, compiled, ".keras")


def case_random_numbers_stay_each_ranks_own(hvd: Any) -> None:
    keras.utils.set_random_seed(hvd.rank())
    made = keras.Sequential([keras.layers.Input((FEATURES,)), keras.layers.Dense(1), keras.layers.Dropout(0.5)])
    made.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
    x, y = batches(hvd.rank(), 1)[0]
    made.fit(x, y, verbose=0, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    states = hvd.allgather_object(numbers(made.non_trainable_variables)[-1].tolist(), name="states")
    assert len({tuple(state) for state in states}) == hvd.size(), states
    weights = hvd.allgather_object([value.tolist() for value in numbers(made.trainable_variables)], name="weights")
    assert all(one == weights[0] for one in weights)


def case_optimizers_that_somebody_else_wrote(hvd: Any) -> None:
    alone = steps_of_one_process(keras.optimizers.SGD(0.1), hvd)
    for kind in (Own, Registered):
        ours = train(compiled(hvd.DistributedOptimizer(kind(0.1))), batches(hvd.rank()))
        check_close(ours, alone)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.keras")
        ours.save(path)
        loaded = train(hvd.load_model(path, custom_optimizers=[Registered]), batches(hvd.rank()))
        assert isinstance(loaded.optimizer, Registered)
        check_same_bits(hvd, loaded)


def case_copies_are_distributed_too(hvd: Any) -> None:
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), op=hvd.Sum)
    alone = steps_of_one_process(keras.optimizers.SGD(0.1 * hvd.size(), momentum=0.9), hvd)
    copies = copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))  # noqa: S301 (our own)
    for again in (*copies, type(optimizer).from_config(optimizer.get_config())):
        check_close(train(compiled(again), batches(hvd.rank())), alone)
        assert again is not optimizer
    assert not optimizer.built


def case_nobody_trains_unsynchronised_in_silence(hvd: Any) -> None:
    times = int(hvd.size() > 1)
    with warned(both.NOT_WRAPPED, times):
        train(compiled(keras.optimizers.Adam(0.01)), batches(hvd.rank()))
    with warned(both.NOT_WRAPPED, 0):
        train(compiled(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01))), batches(hvd.rank()))
    made, by_hand = model(), keras.optimizers.SGD(0.01)
    with warned(both.NOT_WRAPPED, 0):  # whose gradients a loop reduces by hand
        for x, y in batches(hvd.rank()):
            by_hand.apply([hvd.allreduce(one) for one in gradients_of(made, x, y)], made.trainable_variables)
    with warned(both.NOT_WRAPPED, 0):  # who says that it is on purpose
        train(compiled(hvd.unsynchronized(keras.optimizers.SGD(0.01))), batches(hvd.rank()))
    if TENSORFLOW:
        import tensorflow as tf

        import hvdkit.tensorflow

        other, plain = model(), keras.optimizers.SGD(0.01)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(made(x))
        gradients = hvdkit.tensorflow.DistributedGradientTape(tape).gradient(loss, made.trainable_variables)
        with warned(both.NOT_WRAPPED, 0):
            keras.optimizers.SGD(0.01).apply(gradients, made.trainable_variables)
        with warned(both.NOT_WRAPPED, times):  # of another model nobody reduced them
            plain.apply(gradients_of(other, x, y), other.trainable_variables)


def case_local_layers_stay_local(hvd: Any) -> None:
    for scale in (False, True):
        ours = model()
        optimizer = hvd.PartialDistributedOptimizer(
            keras.optimizers.SGD(0.1), local_layers=ours.layers[0], scale_local_gradients=scale
        )
        ours.compile(optimizer=optimizer, loss="mse")
        train(ours, batches(hvd.rank(), 1))
        rate = 0.1 / hvd.size() if scale else 0.1
        mine = train(compiled(keras.optimizers.SGD(rate)), batches(hvd.rank(), 1))
        alone = steps_of_one_process(keras.optimizers.SGD(0.1), hvd, 1)
        check_close(ours.layers[0], mine.layers[0])
        check_close(ours.layers[1], alone.layers[1])


def case_what_an_optimizer_keeps_for_local_layers_stays_local(hvd: Any) -> None:
    for kind in (keras.optimizers.Adam, keras.optimizers.SGD):
        ours = model()
        options = {"momentum": 0.9} if kind is keras.optimizers.SGD else {}
        optimizer = hvd.PartialDistributedOptimizer(kind(0.1, **options), local_layers=ours.layers[0])
        ours.compile(optimizer=optimizer, loss="mse")
        train(ours, batches(hvd.rank(), 1))
        kept = [one for one in optimizer.variables if tuple(one.shape) == tuple(ours.layers[0].kernel.shape)]
        assert len(kept) == (1 if options else 2), [one.path for one in kept]
        before = numbers(kept)
        callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
        callback.set_model(ours)
        callback.on_train_begin()
        for value, other in zip(numbers(kept), before, strict=True):
            np.testing.assert_array_equal(value, other)
        everyones = hvd.allgather_object([value.tobytes() for value in before])
        assert len({tuple(one) for one in everyones}) == hvd.size(), "the same on all ranks before"


def case_process_sets(hvd: Any) -> None:
    if hvd.size() < 3:
        raise Skip("needs a rank outside")
    pair = hvd.add_process_set([0, 2])
    ours = train(compiled(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), process_set=pair)), batches(hvd.rank()))
    members = [0, 2] if pair.included() else [hvd.rank()]
    data = [whole(own) for own in zip(*(batches(rank) for rank in members), strict=True)]
    check_close(ours, train(compiled(keras.optimizers.SGD(0.1)), data))
    hvd.remove_process_set(pair)


def case_embeddings(hvd: Any) -> None:
    def embedding(optimizer: Any) -> Any:
        keras.utils.set_random_seed(3)
        made = keras.Sequential(
            [
                keras.layers.Input((3,), dtype="int32"),
                keras.layers.Embedding(10, 4, dtype="float64"),
                keras.layers.Flatten(),
                keras.layers.Dense(1, dtype="float64"),
            ]
        )
        made.compile(optimizer=optimizer, loss="mse")
        return made

    def rows(rank: int) -> Any:
        return np.random.default_rng(rank).integers(0, 10, size=(ROWS, 3)), np.full((ROWS, 1), float(rank))

    everyones = whole([rows(rank) for rank in range(hvd.size())])
    # Of indices that occur several times Keras's Adagrad adds up the squares, unless they are dense.
    sgd, adagrad = keras.optimizers.SGD, keras.optimizers.Adagrad
    for as_dense, kind in ((False, sgd), (True, sgd), (False, adagrad)):
        optimizer = hvd.DistributedOptimizer(kind(0.1), sparse_as_dense=as_dense)
        ours = train(embedding(optimizer), [rows(hvd.rank())] * 3)
        check_same_bits(hvd, ours)
        check_close(ours, train(embedding(kind(0.1)), [everyones] * 3), 1e-4, 1e-6)


def case_learning_rates_warm_up_and_fall(hvd: Any) -> None:
    told_rates: list[float] = []

    class Tell(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            told_rates.append(float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate)))

    ours = compiled(hvd.DistributedOptimizer(keras.optimizers.SGD(0.8, momentum=0.5)))
    callbacks = [
        hvd.callbacks.LearningRateWarmupCallback(0.8, warmup_epochs=2),
        hvd.callbacks.LearningRateScheduleCallback(0.8, lambda epoch: 0.1**epoch, start_epoch=2),
        Tell(),
    ]
    history = ours.fit(*whole(batches(hvd.rank(), 2)), batch_size=ROWS, epochs=4, verbose=0, callbacks=callbacks)
    size = hvd.size()
    warm = [0.8 / size * ((step + 1) / 2 * (size - 1) / 2 + 1) for step in range(4)]
    np.testing.assert_allclose(told_rates, [*warm, 0.008, 0.008, 0.0008, 0.0008], rtol=1e-5)
    np.testing.assert_allclose(history.history["lr"], [warm[1], 0.8, 0.008, 0.0008], rtol=1e-5)
    check_same_bits(hvd, ours)


def case_a_velocity_follows_the_learning_rate(hvd: Any) -> None:
    made = compiled(hvd.DistributedOptimizer(keras.optimizers.SGD(1.0, momentum=0.5)))
    train(made, batches(hvd.rank(), 1))
    before = numbers(made.optimizer.momentums)
    schedule = hvd.callbacks.LearningRateScheduleCallback(1.0, lambda epoch: 0.25)
    schedule.set_model(made)
    schedule.on_train_batch_begin(0)
    for value, other in zip(numbers(made.optimizer.momentums), before, strict=True):
        np.testing.assert_allclose(value, 0.25 * other)


def case_each_metric_gets_its_own_average(hvd: Any) -> None:
    callback = hvd.callbacks.MetricAverageCallback()
    logs = {"val_loss": float(hvd.rank()), "loss": 10.0 + hvd.rank(), "lr": 0.5}
    callback.on_epoch_end(0, logs)
    mean = (hvd.size() - 1) / 2
    assert list(logs) == ["val_loss", "loss", "lr"]
    np.testing.assert_allclose(list(logs.values()), [mean, 10 + mean, 0.5])


def case_each_element_of_a_metric_gets_its_own_average(hvd: Any) -> None:
    rank, ranks = hvd.rank(), np.arange(hvd.size())
    mean = float(ranks.mean())
    logs = {
        "tensor": keras.ops.convert_to_tensor(np.array([rank, 1.0], np.float32)),
        "counts": keras.ops.convert_to_tensor(np.array([[rank], [2]], np.int32)),
        "array": np.array([rank, np.inf, 3.0]),
        "flags": np.array([True, rank == 0]),
        "list": [rank, [2.0, np.float32(rank)]],
        "by_class": {"b": rank, "a": (bool(rank), 4)},
        "not_finite": float("nan") if rank == 0 else 1.0,
        "none": None,
        "text": "said",
        "number": rank,
    }
    kinds = {name: type(value) for name, value in logs.items()}
    hvd.callbacks.MetricAverageCallback().on_epoch_end(0, logs)
    for name, expected in (
        ("tensor", [mean, 1.0]),
        ("counts", [[mean], [2.0]]),
        ("array", [mean, np.inf, 3.0]),
        ("flags", [1.0, 1 / hvd.size()]),
    ):
        assert isinstance(logs[name], kinds[name]), name
        np.testing.assert_allclose(keras.ops.convert_to_numpy(logs[name]), expected)
    assert str(logs["tensor"].dtype).endswith("float32'>" if TENSORFLOW else "float32")
    assert logs["list"] == [mean, [2.0, mean]]
    assert logs["by_class"] == {"b": mean, "a": (float(np.mean(ranks > 0)), 4.0)}
    assert np.isnan(logs["not_finite"])
    assert (logs["none"], logs["text"], logs["number"]) == (None, "said", mean)


def case_a_metric_of_several_values_is_averaged_by_fit(hvd: Any) -> None:
    both.check_a_metric_of_several_values(hvd, keras)


def case_metrics_of_another_form_are_told(hvd: Any) -> None:
    only_with_others(hvd)
    callback = hvd.callbacks.MetricAverageCallback()
    for mine, others, texts in (
        ({"f1": np.ones(4)}, {"f1": np.ones(3)}, ("rank 0: f1 of shape (4,)", "rank 1: f1 of shape (3,)")),
        ({"f1": np.ones(3)}, {}, ("rank 0: f1 of shape (3,)", "rank 1: none")),
        ({"f1": 1.0}, {"f1": None}, ("rank 0: f1;", "rank 1: none")),
        ({"f1": {"a": 1.0}}, {"f1": {"b": 1.0}}, ("'a'", "'b'")),
        ({"f1": [1.0, 2.0]}, {"f1": [1.0]}, ("different metrics",)),
        ({"loss": 1.0, "val_loss": 2.0}, {"loss": 1.0}, ("rank 0: loss, val_loss", "rank 1: loss")),
    ):
        with told(ValueError, *texts):
            callback.on_epoch_end(0, dict(mine if hvd.rank() == 0 else others))


def case_ranks_with_other_learning_rates_are_told(hvd: Any) -> None:
    only_with_others(hvd)
    model = compiled(hvd.DistributedOptimizer(keras.optimizers.SGD(0.5)))
    x, y = batches(hvd.rank(), 1)[0]
    average = hvd.callbacks.MetricAverageCallback()

    def of_its_own(epoch: int) -> float:
        return 0.5 if hvd.rank() == 0 or epoch == 0 else 0.25

    listed = "; ".join(f"rank {rank}: {0.25 if rank else 0.5}" for rank in range(hvd.size()))
    with told(ValueError, f"different learning rates at the end of epoch 2: {listed}", "HINT", "ReduceLROnPlateau"):
        model.fit(x, y, epochs=3, verbose=0, callbacks=[keras.callbacks.LearningRateScheduler(of_its_own), average])
    alone = compiled(hvd.unsynchronized(keras.optimizers.SGD(0.5)))  # whose rates are each rank's own
    alone.fit(x, y, epochs=2, verbose=0, callbacks=[keras.callbacks.LearningRateScheduler(of_its_own), average])


def case_other_numbers_of_batches_are_an_error_and_no_hang(hvd: Any) -> None:
    only_with_others(hvd)
    ours = compiled(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    x, y = whole(batches(hvd.rank(), 3 if hvd.rank() else 4))
    with told(HorovodInternalError, "MetricAverageCallback"):
        ours.fit(x, y, batch_size=ROWS, shuffle=False, verbose=0, callbacks=[hvd.callbacks.MetricAverageCallback()])


def case_operations_take_what_becomes_a_tensor(hvd: Any) -> None:
    everyone = range(hvd.size())
    for result, expected in (
        (hvd.allreduce([1.0 * hvd.rank(), 2.0], name="a"), [np.mean(everyone), 2.0]),
        (hvd.allreduce(np.array([hvd.rank()]), op=hvd.Sum), [sum(everyone)]),
        (hvd.allgather([[hvd.rank()]]), [[rank] for rank in everyone]),
        (hvd.broadcast(np.array([hvd.rank()]), hvd.size() - 1), [hvd.size() - 1]),
    ):
        np.testing.assert_allclose(keras.ops.convert_to_numpy(result), expected)
    with told(RuntimeError, "broadcast_global_variables"):
        hvd.broadcast_global_variables(0)
    ours = train(compiled(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), seed=hvd.rank()), [])
    ours.optimizer.build(ours.trainable_variables)
    hvd.broadcast_global_variables(0, ours)
    check_same_bits(hvd, ours)


def case_what_makes_no_sense_is_told(hvd: Any) -> None:
    wrap = hvd.DistributedOptimizer
    for error, text, make in (
        (TypeError, "keras.optimizers.get", lambda one: wrap("adam")),
        (ValueError, "once", lambda one: wrap(wrap(one))),
        (ValueError, "Average and Sum", lambda one: wrap(one, op=2)),
        (ValueError, "backward_passes_per_step", lambda one: wrap(one, backward_passes_per_step=0)),
        (ValueError, "groups", lambda one: wrap(one, groups=[3])),
        (TypeError, "compression", lambda one: wrap(one, compression="fp16")),
        (ValueError, "local_layers", lambda one: hvd.PartialDistributedOptimizer(one, local_layers=[3])),
    ):
        with told(error, text):
            make(keras.optimizers.SGD(0.1))
    with told(TypeError, "broadcast_variables: variables[0] must be a variable, got 3.0"):
        hvd.broadcast_variables([3.0])


def case_jit_is_off_by_itself_and_told_where_asked_for(hvd: Any) -> None:
    only_tensorflow()
    only_with_others(hvd)
    import tensorflow as tf

    class Gpu:
        device_type = "GPU"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tf.config, "list_physical_devices", lambda *_: [Gpu()])
        assert compiled(keras.optimizers.SGD(0.1)).jit_compile
        assert not compiled(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))).jit_compile
    asked = compiled(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), jit_compile=True)
    with told(NotImplementedError, "jit_compile=False"):
        train(asked, batches(hvd.rank(), 1))
