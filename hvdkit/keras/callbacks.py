"""Horovod's callbacks for ``model.fit``."""

from __future__ import annotations

import keras

from hvdkit.keras import callback_parts as parts


class BroadcastGlobalVariablesCallback(parts.BroadcastGlobalVariables, keras.callbacks.Callback):  # type: ignore[misc]
    """See parts.BroadcastGlobalVariables."""


class MetricAverageCallback(parts.MetricAverage, keras.callbacks.Callback):  # type: ignore[misc]
    """See parts.MetricAverage."""


class LearningRateScheduleCallback(parts.LearningRateSchedule, keras.callbacks.Callback):  # type: ignore[misc]
    """See parts.LearningRateSchedule."""


class LearningRateWarmupCallback(parts.LearningRateWarmup, keras.callbacks.Callback):  # type: ignore[misc]
    """See parts.LearningRateWarmup."""


__all__ = [
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]
