"""Keras 2, today's tf_keras, which ``tf.keras`` is with TF_USE_LEGACY_KERAS=1: what its optimizers are."""

from __future__ import annotations

import sys
from typing import Any


def optimizer_classes() -> tuple[Any, ...]:
    """The bases of its optimizers, of both kinds; none where nobody imported it."""
    keras2 = sys.modules.get("tf_keras")
    if keras2 is None:
        return ()
    return keras2.optimizers.Optimizer, keras2.optimizers.legacy.Optimizer


def is_legacy(optimizer: Any) -> bool:
    """Whether it is an optimizer of Keras 2."""
    return isinstance(optimizer, optimizer_classes())


def init_scope() -> Any:
    """Outside of the graph that is being traced."""
    import tensorflow as tf

    return tf.init_scope()


def loss_scale_classes() -> tuple[Any, ...]:
    """What wraps an optimizer in a loss scale, of both kinds."""
    if not optimizer_classes():
        return ()
    from tf_keras.src.mixed_precision import loss_scale_optimizer  # type: ignore[import-not-found]  # has no types

    return loss_scale_optimizer.LossScaleOptimizer, loss_scale_optimizer.LossScaleOptimizerV3


def is_built(optimizer: Any) -> bool:
    """Whether an optimizer of either Keras has its variables; those of Keras 2 that cannot say so make them late."""
    return bool(getattr(optimizer, "built", getattr(optimizer, "_built", False)))


def variables_of(optimizer: Any) -> list[Any]:
    """The variables of an optimizer of either Keras."""
    variables = optimizer.variables
    return list(variables() if callable(variables) else variables)
