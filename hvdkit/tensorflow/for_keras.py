"""What Keras asks of TensorFlow's adapter."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import tensorflow as tf

from hvdkit.api import backends
from hvdkit.api.gradients.settings import GradientSettings
from hvdkit.tensorflow.functions import broadcast_variables
from hvdkit.tensorflow.gradients import reduce_gradients
from hvdkit.tensorflow.ops.bridge import after
from hvdkit.tensorflow.ops.unconverted import as_written


class TensorFlowGradients(backends.OptimizerGradients):
    """Reduces gradients when they are applied: in a graph each part leaves as soon as it is computed."""

    def __init__(self, settings: GradientSettings) -> None:
        self._settings = settings

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any], local: Collection[int]) -> list[Any]:
        """See OptimizerGradients."""
        return reduce_gradients(self._settings, gradients, variables, local)


BACKEND = backends.Backend(tf.convert_to_tensor, TensorFlowGradients, broadcast_variables, as_written, after)
