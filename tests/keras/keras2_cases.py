"""Keras 2 (tf_keras), which tf.keras is with TF_USE_LEGACY_KERAS=1, on real ranks, against one process."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import tensorflow as tf

from tests.keras.batches import batches, joined, whole
from tests.keras.checks import check_close, check_same_bits
from tests.keras.models import Registered, compiled, keras, train
from tests.keras.shared_cases import ADAMS
from tests.told import told, warned


def case_a_callback_of_keras_3_refuses_a_model_of_keras_2(hvd):
    from hvdkit.keras.callbacks import MetricAverageCallback

    made = compiled(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    with told(TypeError) as caught:
        made.fit(*whole(batches(hvd.rank(), 2)), verbose=0, callbacks=[MetricAverageCallback()])
    assert str(caught.value) == (
        "MetricAverageCallback is a callback of Keras 3 here, but the model belongs to Keras 2 (tf_keras).\n"
        "HINT: import hvdkit.tensorflow.keras as hvd, whose callbacks are for models of tf.keras, and set "
        "TF_USE_LEGACY_KERAS=1 before TensorFlow is imported, so that tf.keras is tf_keras."
    )


def case_it_is_keras_2(hvd):
    assert tf.keras.Model.__module__.startswith("tf_keras.")
    assert issubclass(hvd.callbacks.MetricAverageCallback, keras.callbacks.Callback)


def case_several_passes_make_a_step(hvd):
    for new in ADAMS:
        for options in ({}, {"run_eagerly": True}):
            wrapped = hvd.DistributedOptimizer(new(), backward_passes_per_step=2, average_aggregated_gradients=True)
            data = [batch for batch in batches(hvd.rank(), 2) for _ in range(2)]
            ours = train(compiled(wrapped, **options), data)
            assert int(ours.optimizer.iterations) == 2
            check_same_bits(hvd, ours)
            check_close(ours, train(compiled(new()), joined(hvd, 2)))


def case_registered_classes_keep_their_names(hvd):
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "model.h5"))
        train(compiled(hvd.DistributedOptimizer(Registered(0.1))), batches(hvd.rank())).save(path)
        assert type(keras.models.load_model(path).optimizer) is Registered
        assert isinstance(hvd.load_model(path, None, None, hvd.Compression.fp16).optimizer, Registered)


def case_gradients_that_are_summed_before_are_not_summed_again(hvd):
    mean = (hvd.size() + 1) / 2
    for kind, name, options in (
        (keras.optimizers.SGD, "aggregate_gradients", {"skip_gradients_aggregation": True}),
        (keras.optimizers.legacy.SGD, "_aggregate_gradients", {"experimental_aggregate_gradients": False}),
    ):
        optimizer = hvd.DistributedOptimizer(kind(1.0))
        variable = tf.Variable(np.zeros(2), name="weight")
        pairs = [(tf.constant([1.0, 2.0], tf.float64) * (hvd.rank() + 1), variable)]
        [(flag, value)] = options.items()
        text = (
            f"The argument {flag}={value} tells the optimizer 'SGD' that its gradients are summed already, but nothing "
            "in this process has summed them: ranks may train different models.\n"
            "HINT: leave the argument out, or call optimizer.aggregate_gradients() first."
        )
        with warned(text, 1):
            optimizer.apply_gradients(pairs, **options)
        variable.assign(np.zeros(2))
        [(gradient, _)] = getattr(optimizer, name)(pairs)
        np.testing.assert_allclose(gradient, [mean, 2 * mean])
        with warned("summed already", 0):
            optimizer.apply_gradients([(tf.clip_by_value(gradient, 0.0, 1.25), variable)], **options)
        np.testing.assert_allclose(variable.numpy(), [-min(mean, 1.25), -1.25])
