"""The class of a distributed optimizer: the user's class, whose ``apply`` reduces gradients first."""

from __future__ import annotations

import weakref
from typing import Any

from hvdkit.api.guard import WATCH
from hvdkit.keras.legacy import init_scope, optimizer_classes
from hvdkit.keras.settings import OptimizerSettings
from hvdkit.keras.step import DistributedStep

_SETTINGS = "_hvdkit_settings"
_STEP = "_hvdkit_step"


def is_distributed(optimizer: Any) -> bool:
    """True for what ``DistributedOptimizer`` returned."""
    return hasattr(type(optimizer), _SETTINGS)


def distributed_step(optimizer: Any) -> DistributedStep | None:
    """What reduces the gradients of an optimizer, or of the one that its loss scale is around; None if nothing does."""
    if is_distributed(optimizer):
        return step_of(optimizer)
    inner = getattr(optimizer, "inner_optimizer", None)
    return None if inner is None else distributed_step(inner)


def step_of(optimizer: Any) -> DistributedStep:
    """The step of a distributed optimizer."""
    step: DistributedStep | None = vars(optimizer).get(_STEP)
    if step is None:  # made by from_config
        step = vars(optimizer)[_STEP] = DistributedStep(getattr(type(optimizer), _SETTINGS))
    return step


def wrap(optimizer: Any, settings: OptimizerSettings) -> Any:
    """A distributed optimizer that shares its variables with ``optimizer``."""
    cls = distributed_class(type(optimizer), settings)
    wrapped = object.__new__(cls)
    vars(wrapped).update(vars(optimizer))
    weakref.finalize(wrapped, _forget_name, cls)
    return wrapped


def distributed_class(base: Any, settings: OptimizerSettings) -> Any:
    """A subclass of ``base`` with its name, also in saved models: they load where there is no hvdkit."""

    class Distributed(base):  # type: ignore[misc]  # the base is known at run time only
        @property
        def process_set(self) -> Any:
            """The ranks among which gradients are reduced."""
            return step_of(self).settings.gradients.process_set

        def register_local_var(self, var: Any) -> None:
            """Leave the gradient of a variable to each rank."""
            step_of(self).register_local(var)

        def __reduce__(self) -> tuple[Any, ...]:
            """Of a copy, or a pickle: that of the plain optimizer, wrapped again."""
            plain = object.__new__(base)
            vars(plain).update({key: value for key, value in vars(self).items() if key != _STEP})
            return wrap, (plain, step_of(self).settings)

        if issubclass(base, optimizer_classes()):  # Keras 2

            def apply_gradients(self, grads_and_vars: Any, *args: Any, **options: Any) -> Any:
                """Reduce the gradients over all ranks, and update the variables. Collective."""
                apply = super().apply_gradients
                return apply_pairs(self, grads_and_vars, lambda pairs: apply(pairs, *args, **options))

        else:

            def apply(self, grads: Any, trainable_variables: Any = None) -> None:
                """Reduce the gradients over all ranks, and update the variables. Collective."""
                if WATCH.inside:  # an optimizer around this one has reduced them
                    super().apply(grads, trainable_variables)
                else:
                    apply_reduced(self, grads, trainable_variables, super().apply)

    setattr(Distributed, _SETTINGS, settings)
    for name in ("__name__", "__qualname__", "__doc__", "__module__"):
        setattr(Distributed, name, getattr(base, name))
    _save_as(Distributed, base)
    return Distributed


def apply_reduced(optimizer: Any, grads: Any, trainable_variables: Any, apply: Any) -> None:
    """The step of an optimizer that is distributed, or has a distributed one inside."""
    step = distributed_step(optimizer)
    assert step is not None
    variables = optimizer._trainable_variables if trainable_variables is None else list(trainable_variables)
    grads = list(grads)
    if len(grads) != len(variables):
        apply(grads, trainable_variables)  # which says what is wrong
        return
    if not optimizer.built and grads:
        # Outside of branches of a graph, where no variable can be made.
        optimizer.build(variables)
        optimizer.built = True
    step.prepare(optimizer._trainable_variables)
    step.run(grads, variables, apply)


def apply_pairs(optimizer: Any, grads_and_vars: Any, apply: Any) -> Any:
    """The step of an optimizer of Keras 2 that is distributed, or has a distributed one inside."""
    pairs = list(grads_and_vars)
    if WATCH.inside or not pairs:
        return apply(pairs)
    step = distributed_step(optimizer)
    assert step is not None
    grads, variables = zip(*pairs, strict=True)
    with init_scope():  # in a graph no variable can be made
        step.prepare(variables)
    step.run(grads, variables, lambda reduced, theirs: apply(list(zip(reduced, theirs, strict=True))))
    return optimizer.iterations


def _save_as(cls: Any, base: Any) -> None:
    """Let Keras write the name of ``base`` into saved models, not that of a class that nobody could import."""
    for names in _saved_names():
        if base in names:
            names[cls] = names[base]


def _forget_name(cls: Any) -> None:
    for names in _saved_names():
        names.pop(cls, None)


def _saved_names() -> list[dict[Any, str]]:
    """Where Keras looks up the names of its classes, and of those that users registered."""
    try:
        from keras.src import api_export
        from keras.src.saving import object_registration
    except ImportError:  # another layout of Keras: saved models name the module and class of base
        return []
    return [api_export.REGISTERED_OBJS_TO_NAMES, object_registration.GLOBAL_CUSTOM_NAMES]
