"""SyncBatchNormalization over all ranks' batches against the layer of Keras in one process that has them all."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from hvdkit.errors import HorovodInternalError
from tests.tensorflow.data import doubles, needs_ranks, ways
from tests.told import told

keras = tf.keras
TOLERANCES = {"float32": 1e-5, "float64": 1e-12, "mixed_float16": 3e-3}
# Shapes of one element of a batch, and the axis of the channels.
PLACES = (((4,), -1), ((5, 3), -1), ((3, 2, 4), 1), ((2, 2, 3, 2), 2))


def normal(seed: int, *shape: int, mean: float = 5.0) -> np.ndarray:
    """The same numbers on all ranks; far from zero, so that a careless variance would cancel."""
    return np.random.default_rng(seed).normal(mean, 1.0, shape)


def uneven(size: int, shape: tuple[int, ...]) -> list[np.ndarray]:
    """A batch for each rank; the rows differ in number."""
    return [normal(rank, 3 + rank, *shape) for rank in range(size)]


def rows_of(hvd: Any, batches: list[np.ndarray]) -> slice:
    """Where this rank's batch is in the joined one."""
    before = sum(len(batch) for batch in batches[: hvd.rank()])
    return slice(before, before + len(batches[hvd.rank()]))


def own_and_joined(hvd: Any, batches: list[np.ndarray], dtype: Any = None) -> tuple[Any, Any]:
    return tf.constant(batches[hvd.rank()], dtype), tf.constant(np.concatenate(batches), dtype)


def built(hvd: Any, shape: tuple[int, ...], **options: Any) -> tuple[Any, Any]:
    """The layer and that of Keras, with weights that are neither zeros nor ones. ``own``: options of the first."""
    own, layers = options.pop("own", {}), []
    for kind, more in ((hvd.SyncBatchNormalization, own), (keras.layers.BatchNormalization, {})):
        layer = kind(momentum=0.7, **{**options, **more})
        layer.build((None, *shape))
        layer.gamma.assign(np.linspace(0.5, 1.5, layer.gamma.shape[0]))
        layer.beta.assign(np.linspace(-1.0, 1.0, layer.beta.shape[0]))
        layers.append(layer)
    return layers[0], layers[1]


def train(layer: Any) -> Callable[..., list[Any]]:
    """A step of training: the outputs, and the gradients of inputs, gamma and beta."""

    def step(inputs: Any, weights: Any, mask: Any = None) -> list[Any]:
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            outputs = layer(inputs, training=True, mask=mask)
            loss = tf.reduce_sum(outputs * tf.cast(weights, outputs.dtype))
        return [outputs, *tape.gradient(loss, [inputs, *layer.trainable_variables])]

    return step


def check_close(got: Any, expected: Any, tolerance: float, *what: Any) -> None:
    """Equal, relative to the largest value there is."""
    wanted = doubles(expected)
    largest = np.abs(wanted).max(initial=0.0)
    np.testing.assert_allclose(doubles(got), wanted, rtol=0, atol=tolerance * largest, err_msg=str(what))


def check_as_one(
    hvd: Any, batches: list[np.ndarray], dtype: str, masks: list[Any] | None = None, **options: Any
) -> None:
    """Steps of training, eager and in a graph, and an evaluation, beside Keras in float64 with the joined batch."""
    shape, mine, tolerance = batches[0].shape[1:], rows_of(hvd, batches), TOLERANCES[dtype]
    layer, _ = built(hvd, shape, dtype=dtype, **options)
    _, reference = built(hvd, shape, dtype="float64", **options)
    own = () if masks is None else (masks[hvd.rank()],)
    joined = () if masks is None else (tf.concat(masks, 0),)
    for number, step in enumerate(ways(train(layer)), 1):
        inputs = tf.constant(number * np.concatenate(batches), tf.as_dtype(dtype.removeprefix("mixed_")))
        weights = normal(99 + number, *inputs.shape, mean=0.0)
        outputs, of_inputs, *of_weights = step(inputs[mine], tf.constant(weights[mine]), *own)
        expected = train(reference)(tf.cast(inputs, tf.float64), tf.constant(weights), *joined)
        assert outputs.dtype == of_inputs.dtype == inputs.dtype
        assert outputs.shape == inputs[mine].shape
        check_close(outputs, expected[0][mine], tolerance, shape, options)
        check_close(of_inputs, expected[1][mine], tolerance, shape, options)
        for gradient, wanted in zip(of_weights, expected[2:], strict=True):
            check_close(hvd.allreduce(gradient, op=hvd.Sum), wanted, tolerance, shape, options)
    for moving in ("moving_mean", "moving_variance"):
        check_close(getattr(layer, moving), getattr(reference, moving), min(tolerance, 1e-5), moving, shape)
    check_close(layer(inputs[mine]), reference(tf.cast(inputs, tf.float64))[mine], tolerance, shape)


def case_batches_are_normalised_as_one(hvd):
    for dtype in ("float32", "float64"):
        for shape, axis in PLACES:
            check_as_one(hvd, uneven(hvd.size(), shape), dtype, axis=axis)


def case_masked_values_do_not_count(hvd):
    for shape, axis in (((5, 3), -1), ((3, 4, 2), 1)):
        batches = uneven(hvd.size(), shape)
        masks = [tf.constant(normal(50 + rank, *batch.shape[:-1]) > 5) for rank, batch in enumerate(batches)]
        if hvd.size() > 1:
            masks[-1] = tf.zeros_like(masks[-1])
        check_as_one(hvd, batches, "float32", masks, axis=axis)


def case_a_rank_may_have_a_mask_and_another_none(hvd):
    batches = uneven(hvd.size(), (5, 3))
    layer, reference = built(hvd, (5, 3))
    own, joined = own_and_joined(hvd, batches, tf.float32)
    outputs = layer(own, training=True, mask=tf.ones(own.shape[:-1], tf.bool) if hvd.rank() == 0 else None)
    check_close(outputs, reference(joined, training=True)[rows_of(hvd, batches)], 1e-5)


def case_the_variance_is_right_where_the_mean_is_large(hvd):
    batches = [normal(rank, 200, 3, mean=1000.0).astype(np.float32) for rank in range(hvd.size())]
    layer = hvd.SyncBatchNormalization(momentum=0.0)
    layer(tf.constant(batches[hvd.rank()]), training=True)
    exact = np.concatenate(batches).astype(np.float64)
    np.testing.assert_allclose(layer.moving_mean, exact.mean(0), rtol=1e-6)
    np.testing.assert_allclose(layer.moving_variance, exact.var(0), rtol=1e-5)


def case_half_precision_has_statistics_in_single(hvd):
    check_as_one(hvd, uneven(hvd.size(), (5, 3)), "mixed_float16")


def case_moving_averages_have_the_same_bits_on_all_ranks(hvd):
    layer, _ = built(hvd, (7,))
    step = tf.function(train(layer))
    for number in range(5):
        inputs = tf.constant(normal(100 * number + hvd.rank(), 4, 7), tf.float32)
        step(inputs, inputs)
    for moving in (layer.moving_mean, layer.moving_variance):
        all_of_them = hvd.allgather(tf.convert_to_tensor(moving)[tf.newaxis]).numpy()
        np.testing.assert_array_equal(all_of_them, np.broadcast_to(all_of_them[0], all_of_them.shape))


def case_a_rank_may_have_an_empty_batch(hvd):
    needs_ranks(hvd)
    batches = uneven(hvd.size(), (3, 2))
    batches[0] = batches[0][:0]
    check_as_one(hvd, batches, "float32")


def case_a_rank_that_has_joined_does_not_count(hvd):
    needs_ranks(hvd)
    batches = uneven(hvd.size() - 1, (3,))
    layer, reference = built(hvd, (3,), dtype="float64", own={"name": "before_the_end"})
    if hvd.rank() == len(batches):
        hvd.join()
        return
    own, joined = own_and_joined(hvd, batches)
    results = train(layer)(own, own)
    hvd.join()
    for result, expected in zip(results[:2], train(reference)(joined, joined)[:2], strict=True):
        check_close(result, expected[rows_of(hvd, batches)], 1e-10)
    check_close(layer.moving_variance, reference.moving_variance, 1e-10)


def case_gradients_of_gradients_of_batches(hvd):
    batches = uneven(hvd.size(), (3,))
    layer, _ = built(hvd, (3,), dtype="float64")

    def as_one(inputs):
        centered = inputs - tf.reduce_mean(inputs, 0)
        return layer.gamma * centered / tf.sqrt(tf.reduce_mean(centered**2, 0) + layer.epsilon) + layer.beta

    def second(function, inputs):
        with tf.GradientTape() as outer:
            outer.watch(inputs)
            with tf.GradientTape() as inner:
                inner.watch(inputs)
                loss = tf.reduce_sum(function(inputs) ** 3)
            penalty = tf.reduce_sum(inner.gradient(loss, inputs) ** 2)
        return outer.gradient(penalty, inputs)

    own, joined = own_and_joined(hvd, batches)
    result = second(lambda inputs: layer(inputs, training=True), own)
    if hvd.size() > 1:  # the layer of Keras leaves out a part
        check_close(result, second(as_one, joined)[rows_of(hvd, batches)], 1e-10)


def case_evaluation_and_frozen_layers_do_not_communicate(hvd):
    layer, _ = built(hvd, (4,))
    if hvd.rank() == 0:
        assert layer(tf.ones([2, 4])).shape == (2, 4)
        layer.trainable = False
        assert layer(tf.ones([2, 4]), training=True).shape == (2, 4)


def case_a_layer_may_be_used_twice_and_another_have_its_name(hvd):
    batches = uneven(hvd.size(), (3,))
    pairs = [built(hvd, (3,), dtype="float64", own={"name": "twin"}) for _ in range(2)]
    layers, references = zip(*pairs, strict=True)

    def twice(layers):
        def call(inputs):
            first = layers[0](inputs, training=True)
            return first + layers[0](inputs**2, training=True) * layers[1](inputs**3, training=True)

        return call

    own, joined = own_and_joined(hvd, batches)
    for call in ways(twice(layers)):
        check_close(call(own), twice(references)(joined)[rows_of(hvd, batches)], 1e-10)


def case_a_process_set_has_statistics_of_its_own(hvd):
    needs_ranks(hvd, 3)
    pair = hvd.add_process_set([0, 2])
    batches = uneven(hvd.size(), (3,))
    together = [batches[0], batches[2]] if pair.included() else [batches[1]]
    layer, reference = built(hvd, (3,), own={"process_set": pair})
    layer(tf.constant(batches[hvd.rank()], tf.float32), training=True)
    reference(tf.constant(np.concatenate(together), tf.float32), training=True)
    check_close(layer.moving_variance, reference.moving_variance, 1e-5)
    hvd.remove_process_set(pair)
    with told(ValueError, "SyncBatchNormalization", "must be registered"):
        layer(tf.ones([2, 3]), training=True)


def case_channels_that_differ_are_told_with_the_name_of_the_layer(hvd):
    needs_ranks(hvd)
    layer, _ = built(hvd, (2 + hvd.rank(),), own={"name": "other_channels"})
    for step in ways(train(layer)):
        with told(HorovodInternalError, "other_channels", "rank 1"):
            step(tf.ones([3, 2 + hvd.rank()]), tf.ones([1]))


def case_options_that_make_no_sense_are_refused(hvd):
    fused = "TensorFlow's fused kernel cannot use the statistics of all ranks.\nHINT: leave fused out."
    for name, value, reason in (
        ("fused", True, fused),
        ("fused", None, fused),
        (
            "renorm",
            True,
            "it compensates for small batches, but here the batch is that of all ranks.\nHINT: leave renorm out.",
        ),
        (
            "virtual_batch_size",
            2,
            "statistics are those of all batches.\nHINT: leave it out, or use Keras' BatchNormalization.",
        ),
        (
            "synchronized",
            True,
            "it is for tf.distribute, but here ranks are synchronised.\nHINT: leave synchronized out.",
        ),
    ):
        with told(ValueError, f"SyncBatchNormalization does not support {name}: {reason}"):
            hvd.SyncBatchNormalization(**{name: value})
    hvd.SyncBatchNormalization(fused=False, virtual_batch_size=None)


def case_configurations_and_models_come_back(hvd):
    layer = hvd.SyncBatchNormalization(1, momentum=0.5, epsilon=0.25, scale=False, name="kept")
    same = hvd.SyncBatchNormalization.from_config(layer.get_config())
    assert same.get_config() == layer.get_config()
    assert (same.axis, same.momentum, same.epsilon, same.name) == (1, 0.5, 0.25, "kept")
    assert same.process_set is hvd.global_process_set
    model = keras.Sequential([keras.Input((3, 2)), layer])
    model(tf.constant(normal(hvd.rank(), 4, 3, 2), tf.float32), training=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.keras")
        model.save(path)
        loaded = keras.models.load_model(path)
    assert type(loaded.layers[-1]) is hvd.SyncBatchNormalization
    np.testing.assert_array_equal(loaded.layers[-1].moving_mean, layer.moving_mean)


def case_models_fit(hvd):
    batches = [normal(rank, 6, 3).astype(np.float32) for rank in range(hvd.size())]
    layer = hvd.SyncBatchNormalization(momentum=0.0)
    model = keras.Sequential([keras.Input((3,)), layer, keras.layers.Dense(1)])
    model.compile("sgd", "mse")  # by itself Keras would choose XLA
    model.fit(batches[hvd.rank()], np.ones((6, 1)), batch_size=6, epochs=2, verbose=0)
    np.testing.assert_allclose(layer.moving_mean, np.concatenate(batches).mean(0), rtol=1e-5)
    np.testing.assert_allclose(layer.moving_variance, np.concatenate(batches).var(0), rtol=1e-5)
