"""Horovod's API for Keras on TensorFlow: ``import hvdkit.tensorflow.keras as hvd``. See hvdkit.keras."""

import keras

if keras.backend.backend() != "tensorflow":
    raise ImportError(
        f"hvdkit.tensorflow.keras needs Keras on TensorFlow, and it runs on {keras.backend.backend()}.\n"
        "HINT: set KERAS_BACKEND=tensorflow, or import hvdkit.keras."
    )

import hvdkit.keras
from hvdkit.keras import *  # noqa: F403

__all__ = hvdkit.keras.__all__
