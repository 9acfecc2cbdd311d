"""Elastic training with tf.keras, be it Keras 3 or tf_keras, as ``horovod.tensorflow.keras.elastic``."""

from __future__ import annotations

import tensorflow as tf

from hvdkit.keras import elastic as parts
from hvdkit.keras.elastic import ObjectState, State, run
from hvdkit.tensorflow.elastic import TensorFlowKerasState as KerasState

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "ObjectState",
    "State",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]


class CommitStateCallback(parts.CommitState, tf.keras.callbacks.Callback):  # type: ignore[misc]
    """See hvdkit.keras.elastic.CommitStateCallback."""


class UpdateBatchStateCallback(parts.UpdateBatchState, tf.keras.callbacks.Callback):  # type: ignore[misc]
    """See hvdkit.keras.elastic.UpdateBatchStateCallback."""


class UpdateEpochStateCallback(parts.UpdateEpochState, tf.keras.callbacks.Callback):  # type: ignore[misc]
    """See hvdkit.keras.elastic.UpdateEpochStateCallback."""
