"""Differences between the optimizers of Keras 3 and Keras 2: tf_keras, or ``tf.keras`` with TF_USE_LEGACY_KERAS=1."""

from __future__ import annotations

import sys
from typing import Any


def optimizer_classes() -> tuple[Any, ...]:
    """Return the base classes of Keras 2's optimizers, before and since 2.11; none if nothing has imported Keras 2."""
    keras2 = sys.modules.get("tf_keras")
    if keras2 is None:
        return ()
    return keras2.optimizers.Optimizer, keras2.optimizers.legacy.Optimizer


def is_keras_2(optimizer: Any) -> bool:
    """True if the optimizer is of Keras 2."""
    return isinstance(optimizer, optimizer_classes())


def needs_other_callbacks(model: Any, callback: Any) -> bool:
    """True if the model is of Keras 2 and the callback is not."""
    if (keras2 := sys.modules.get("tf_keras")) is None:
        return False
    return isinstance(model, keras2.Model) and not isinstance(callback, keras2.callbacks.Callback)


def init_scope() -> Any:
    """Return a context outside of the graph that is being traced."""
    import tensorflow as tf

    return tf.init_scope()


def loss_scale_classes() -> tuple[Any, ...]:
    """Return the classes of Keras 2 that wrap an optimizer in a loss scale."""
    if not optimizer_classes():
        return ()
    from tf_keras.src.mixed_precision import loss_scale_optimizer

    return loss_scale_optimizer.LossScaleOptimizer, loss_scale_optimizer.LossScaleOptimizerV3


def saved_names() -> list[dict[Any, str]]:
    """Return the tables in which Keras 2 looks up the names of registered classes."""
    if not optimizer_classes():
        return []
    from tf_keras.src.saving import object_registration

    return [object_registration._GLOBAL_CUSTOM_NAMES]


def skips(options: dict[str, Any]) -> str | None:
    """Return the argument of apply_gradients() that says that gradients are summed already, or None."""
    if options.get("skip_gradients_aggregation", False):
        return "skip_gradients_aggregation=True"
    if not options.get("experimental_aggregate_gradients", True):
        return "experimental_aggregate_gradients=False"
    return None


def name_of(optimizer: Any) -> str:
    """Return the name of an optimizer of Keras 2 or 3."""
    return str(getattr(optimizer, "name", None) or getattr(optimizer, "_name", ""))


def is_built(optimizer: Any) -> bool:
    """True if an optimizer of Keras 2 or 3 has its variables."""
    if hasattr(optimizer, "_create_all_weights"):  # before 2.11; its first variable is the number of steps
        return len(variables_of(optimizer)) > 1
    return bool(getattr(optimizer, "built", getattr(optimizer, "_built", False)))


def build(optimizer: Any, variables: list[Any]) -> None:
    """Make the variables of an optimizer of Keras 2 or 3 for the variables of a model."""
    make = getattr(optimizer, "_create_all_weights", None) or optimizer.build
    make(variables)


def variables_of(optimizer: Any) -> list[Any]:
    """Return the variables of an optimizer of Keras 2 or 3."""
    variables = optimizer.variables
    return list(variables() if callable(variables) else variables)


def velocities_of(optimizer: Any, variables: list[Any]) -> list[Any]:
    """Return the velocities of an SGD of Keras 2 or 3; none without momentum, or before its first step."""
    if hasattr(optimizer, "get_slot_names"):  # before 2.11
        has_slots = "momentum" in optimizer.get_slot_names()
        return [optimizer.get_slot(variable, "momentum") for variable in variables] if has_slots else []
    velocities = getattr(optimizer, "momentums", None) or []
    return [velocity for velocity in velocities if velocity is not None]
