"""Horovod's callbacks for ``model.fit`` of tf.keras, be it Keras 3 or tf_keras."""

from __future__ import annotations

import tensorflow as tf

from hvdkit.keras import callbacks as parts


class BroadcastGlobalVariablesCallback(parts.BroadcastGlobalVariablesCallback, tf.keras.callbacks.Callback):  # type: ignore[misc]
    """See hvdkit.keras.callbacks.BroadcastGlobalVariablesCallback."""


class MetricAverageCallback(parts.MetricAverageCallback, tf.keras.callbacks.Callback):  # type: ignore[misc]
    """See hvdkit.keras.callbacks.MetricAverageCallback."""


class LearningRateScheduleCallback(parts.LearningRateScheduleCallback, tf.keras.callbacks.Callback):  # type: ignore[misc]
    """See hvdkit.keras.callbacks.LearningRateScheduleCallback."""


class LearningRateWarmupCallback(parts.LearningRateWarmupCallback, tf.keras.callbacks.Callback):  # type: ignore[misc]
    """See hvdkit.keras.callbacks.LearningRateWarmupCallback."""


__all__ = parts.__all__
