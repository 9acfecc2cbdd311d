"""Horovod's callbacks for ``model.fit`` of tf.keras, be it Keras 3 or tf_keras."""

from __future__ import annotations

import tensorflow as tf

from hvdkit.keras import callbacks as parts


class BroadcastGlobalVariablesCallback(parts.BroadcastGlobalVariables, tf.keras.callbacks.Callback):  # type: ignore[misc]
    """See hvdkit.keras.callbacks.BroadcastGlobalVariablesCallback."""


class MetricAverageCallback(parts.MetricAverage, tf.keras.callbacks.Callback):  # type: ignore[misc]
    """See hvdkit.keras.callbacks.MetricAverageCallback."""


class LearningRateScheduleCallback(parts.LearningRateSchedule, tf.keras.callbacks.Callback):  # type: ignore[misc]
    """See hvdkit.keras.callbacks.LearningRateScheduleCallback."""


class LearningRateWarmupCallback(parts.LearningRateWarmup, tf.keras.callbacks.Callback):  # type: ignore[misc]
    """See hvdkit.keras.callbacks.LearningRateWarmupCallback."""


__all__ = parts.__all__
