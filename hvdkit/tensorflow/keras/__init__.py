"""Horovod's API for ``tf.keras``: ``import hvdkit.tensorflow.keras as hvd``. See hvdkit.keras.

``tf.keras`` is Keras 3, or tf_keras (Keras 2) with TF_USE_LEGACY_KERAS=1.
"""

from typing import Any

import keras

if keras.backend.backend() != "tensorflow":
    raise ImportError(
        f"hvdkit.tensorflow.keras needs Keras on TensorFlow, and it runs on {keras.backend.backend()}.\n"
        "HINT: set KERAS_BACKEND=tensorflow, or import hvdkit.keras."
    )

import hvdkit.keras
import hvdkit.tensorflow.keras.callbacks as callbacks_of_tf_keras
from hvdkit.api import missing_attribute
from hvdkit.keras import *  # noqa: F403
from hvdkit.keras import unwrapped
from hvdkit.tensorflow.keras.saving import load_model as load_model

callbacks = callbacks_of_tf_keras  # type: ignore[misc]  # not those of hvdkit.keras
unwrapped.install()

__all__ = hvdkit.keras.__all__


def __getattr__(name: str) -> Any:
    raise missing_attribute(__name__, name)


def __dir__() -> list[str]:
    return sorted(__all__)
