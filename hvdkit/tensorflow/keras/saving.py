"""Models that were saved with an optimizer, loaded with a distributed one."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from hvdkit.api.gradients.compression import Compressions
from hvdkit.keras.optimizer import load_by


def load_model(
    filepath: str | os.PathLike[str],
    custom_optimizers: Sequence[Any] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: Any = Compressions.none,
    legacy_opts: bool = False,
    safe_mode: bool = True,
    **options: Any,
) -> Any:
    """See hvdkit.keras.load_model; of ``tf.keras``, be it Keras 3 or tf_keras."""
    options.update(custom_optimizers=custom_optimizers, custom_objects=custom_objects, safe_mode=safe_mode)
    return load_by(tf.keras, filepath, compression=compression, **options)
