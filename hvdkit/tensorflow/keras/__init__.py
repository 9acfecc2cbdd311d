"""Horovod's API for ``tf.keras``: ``import hvdkit.tensorflow.keras as hvd``. See hvdkit.keras.

``tf.keras`` is Keras 3, or tf_keras (Keras 2) with TF_USE_LEGACY_KERAS=1.
"""

import importlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

if keras.backend.backend() != "tensorflow":
    raise ImportError(
        f"hvdkit.tensorflow.keras needs Keras on TensorFlow, but Keras runs on {keras.backend.backend()}.\n"
        "HINT: set KERAS_BACKEND=tensorflow, or import hvdkit.keras."
    )

import hvdkit.keras
import hvdkit.tensorflow.keras.callbacks as callbacks_of_tf_keras
from hvdkit.api import missing_attribute
from hvdkit.api.gradients.compression import Compressions
from hvdkit.keras import *  # noqa: F403
from hvdkit.keras import unwrapped
from hvdkit.keras.optimizer import load_by

callbacks = callbacks_of_tf_keras  # type: ignore[misc]  # not those of hvdkit.keras
unwrapped.install()


def load_model(  # type: ignore[no-redef]  # that of hvdkit.keras loads models of Keras 3 only
    filepath: str | os.PathLike[str],
    custom_optimizers: Sequence[Any] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: Any = Compressions.none,
    legacy_opts: bool = False,
    safe_mode: bool = True,
    **options: Any,
) -> Any:
    """Load a model of ``tf.keras``, be it Keras 3 or tf_keras. See hvdkit.keras.load_model."""
    return load_by(tf.keras, filepath, custom_optimizers, custom_objects, safe_mode, compression=compression, **options)


__all__ = hvdkit.keras.__all__


def __getattr__(name: str) -> Any:
    if name == "elastic":
        return importlib.import_module("hvdkit.tensorflow.keras.elastic")
    raise missing_attribute(__name__, name)


def __dir__() -> list[str]:
    return sorted(__all__)
