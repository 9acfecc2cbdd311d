"""The gradients of an optimizer's step on the TensorFlow backend."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from hvdkit.keras.settings import OptimizerSettings
from hvdkit.tensorflow.gradient_settings import GradientSettings
from hvdkit.tensorflow.gradients import reduce_gradients


class TensorFlowGradients:
    """Reduces gradients of TensorFlow, eager and in graphs."""

    def __init__(self, settings: OptimizerSettings) -> None:
        self._settings = GradientSettings(
            title=settings.title,
            op=settings.op,
            compression=settings.compression,
            predivide=settings.predivide,
            groups=settings.groups,
            sparse_as_dense=settings.sparse_as_dense,
            process_set=settings.process_set,
            scale_local_gradients=settings.scale_local_gradients,
            device_dense=settings.device_dense,
            device_sparse=settings.device_sparse,
            policy=settings.policy,
        )

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any], local: Collection[int]) -> list[Any]:
        """See reduce_gradients()."""
        return reduce_gradients(self._settings, gradients, variables, local)
