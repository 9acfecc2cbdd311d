"""Elastic training with tf.keras, be it Keras 3 or tf_keras, as ``horovod.tensorflow.keras.elastic``."""

from __future__ import annotations

import tensorflow as tf

from hvdkit.keras import elastic as parts
from hvdkit.keras.elastic import ObjectState, State, run
from hvdkit.keras.fit_state import FitState
from hvdkit.tensorflow.elastic import TensorFlowKerasState

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "ObjectState",
    "State",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]


class KerasState(TensorFlowKerasState, FitState):
    """See hvdkit.keras.elastic.KerasState."""


class CommitStateCallback(parts.CommitState, tf.keras.callbacks.Callback):  # type: ignore[misc]
    """See hvdkit.keras.elastic.CommitStateCallback."""


class UpdateBatchStateCallback(parts.UpdateBatchState, tf.keras.callbacks.Callback):  # type: ignore[misc]
    """See hvdkit.keras.elastic.UpdateBatchStateCallback."""


class UpdateEpochStateCallback(parts.UpdateEpochState, tf.keras.callbacks.Callback):  # type: ignore[misc]
    """See hvdkit.keras.elastic.UpdateEpochStateCallback."""
