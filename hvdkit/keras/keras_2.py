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


def is_keras_2(optimizer: Any) -> bool:
    """Whether it is an optimizer of Keras 2."""
    return isinstance(optimizer, optimizer_classes())


def needs_other_callbacks(model: Any, callback: Any) -> bool:
    """Whether a model is of Keras 2 and a callback is not."""
    if (keras2 := sys.modules.get("tf_keras")) is None:
        return False
    return isinstance(model, keras2.Model) and not isinstance(callback, keras2.callbacks.Callback)


def init_scope() -> Any:
    """Outside of the graph that is being traced."""
    import tensorflow as tf

    return tf.init_scope()


def loss_scale_classes() -> tuple[Any, ...]:
    """What wraps an optimizer in a loss scale, of both kinds."""
    if not optimizer_classes():
        return ()
    from tf_keras.src.mixed_precision import loss_scale_optimizer

    return loss_scale_optimizer.LossScaleOptimizer, loss_scale_optimizer.LossScaleOptimizerV3


def saved_names() -> list[dict[Any, str]]:
    """Where it looks up the names of classes that users registered."""
    if not optimizer_classes():
        return []
    from tf_keras.src.saving import object_registration

    return [object_registration._GLOBAL_CUSTOM_NAMES]


def skips(options: dict[str, Any]) -> str | None:
    """How the arguments of apply_gradients() say that gradients are summed already; None if they do not."""
    if options.get("skip_gradients_aggregation", False):
        return "skip_gradients_aggregation=True"
    if not options.get("experimental_aggregate_gradients", True):
        return "experimental_aggregate_gradients=False"
    return None


def name_of(optimizer: Any) -> str:
    """The name of an optimizer of either Keras."""
    return str(getattr(optimizer, "name", None) or getattr(optimizer, "_name", ""))


def is_built(optimizer: Any) -> bool:
    """Whether an optimizer of either Keras has its variables."""
    if hasattr(optimizer, "_create_all_weights"):  # before 2.11; its first variable is the number of steps
        return len(variables_of(optimizer)) > 1
    return bool(getattr(optimizer, "built", getattr(optimizer, "_built", False)))


def build(optimizer: Any, variables: list[Any]) -> None:
    """Have an optimizer of either Keras make its variables for those of a model."""
    make = getattr(optimizer, "_create_all_weights", None) or optimizer.build
    make(variables)


def variables_of(optimizer: Any) -> list[Any]:
    """The variables of an optimizer of either Keras."""
    variables = optimizer.variables
    return list(variables() if callable(variables) else variables)


def velocities_of(optimizer: Any, variables: list[Any]) -> list[Any]:
    """The velocities of an SGD of either Keras; none without momentum, or before its first step."""
    if hasattr(optimizer, "get_slot_names"):  # before 2.11
        has_slots = "momentum" in optimizer.get_slot_names()
        return [optimizer.get_slot(variable, "momentum") for variable in variables] if has_slots else []
    velocities = getattr(optimizer, "momentums", None) or []
    return [velocity for velocity in velocities if velocity is not None]
