"""Differences between the optimizers of Keras 3 and Keras 2: tf_keras, or ``tf.keras`` with TF_USE_LEGACY_KERAS=1."""

from __future__ import annotations

import sys
from typing import Any

import keras


def optimizer_classes() -> tuple[Any, ...]:
    """Return the base classes of Keras 2's optimizers, before and since 2.11; none if nothing has imported Keras 2."""
    keras2 = sys.modules.get("tf_keras")
    return () if keras2 is None else (keras2.optimizers.Optimizer, keras2.optimizers.legacy.Optimizer)


def name_of(optimizer: Any) -> str:
    """Return the name of an optimizer of Keras 2 or 3."""
    return str(getattr(optimizer, "name", None) or getattr(optimizer, "_name", ""))


def build(optimizer: Any, variables: list[Any]) -> None:
    """Make the variables of an optimizer of Keras 2 or 3 for the variables of a model, unless it has them."""
    if make := getattr(optimizer, "_create_all_weights", None):  # before 2.11
        is_built = len(variables_of(optimizer)) > 1  # the first variable is the number of steps
    else:
        make = optimizer.build
        is_built = getattr(optimizer, "built", getattr(optimizer, "_built", False))
    if not is_built:
        make(variables)


def variables_of(optimizer: Any) -> list[Any]:
    """Return the variables of an optimizer of Keras 2 or 3; none of None."""
    variables = getattr(optimizer, "variables", ())
    return list(variables() if callable(variables) else variables)


def rate_of(optimizer: Any) -> float:
    """Return the learning rate of an optimizer of Keras 2 or 3 now."""
    return float(keras.ops.convert_to_numpy(optimizer.learning_rate))


def velocities_of(optimizer: Any, variables: list[Any]) -> list[Any]:
    """Return the velocities of an SGD of Keras 2 or 3; none without momentum, or before its first step."""
    if hasattr(optimizer, "get_slot_names"):  # before 2.11
        has_slots = "momentum" in optimizer.get_slot_names()
        return [optimizer.get_slot(variable, "momentum") for variable in variables] if has_slots else []
    velocities = getattr(optimizer, "momentums", None) or []
    return [velocity for velocity in velocities if velocity is not None]


def slots_of(optimizer: Any, local: set[int]) -> set[int]:
    """Return the ids of an optimizer's state for variables of these ids: momenta, accumulators, averages."""
    if optimizer is None or not local:
        return set()
    variables = getattr(optimizer, "_trainable_variables", None) or []
    slots = slots_of(getattr(optimizer, "inner_optimizer", None), local)
    for state in vars(optimizer).values():
        # Keras 3 has a list for each kind of slot, with an entry for each variable.
        if state is not variables and isinstance(state, list) and len(state) == len(variables):
            slots.update(id(slot) for variable, slot in zip(variables, state, strict=True) if id(variable) in local)
    return slots
