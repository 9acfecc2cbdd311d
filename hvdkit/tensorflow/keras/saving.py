"""Models that were saved with an optimizer, loaded with a distributed one."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvdkit.keras import saving


def load_model(*args: Any, **options: Any) -> Any:
    """See hvdkit.keras.load_model; of ``tf.keras``, be it Keras 3 or tf_keras."""
    return saving.load_by(tf.keras, *args, **options)
