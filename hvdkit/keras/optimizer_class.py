"""The class of a distributed optimizer: a subclass of the user's class that reduces gradients before it updates.

A distributed optimizer shares the variables of the optimizer that it wraps, and is saved under that optimizer's name.
A loss scale must decide alike on all ranks, so gradients are reduced before the loss scale looks at them, whether it is
inside or around.
"""

from __future__ import annotations

import functools
import types
import warnings
import weakref
from contextlib import suppress
from typing import Any

from hvdkit.api.gradients.guard import WATCH, is_marked, mark
from hvdkit.keras import keras_2
from hvdkit.keras.functions import backend
from hvdkit.keras.step import SETTINGS, STEP, KerasSettings, distributed_step, scale_loss_and_begin, step_of

LOCAL_IN_COPY = (
    "A distributed optimizer that leaves variables to each rank ({names}) cannot be deep-copied or pickled: these are "
    "variables of its own model, and a copy would reduce the variables of another model.\n"
    "HINT: copy the optimizer before it is wrapped, and give PartialDistributedOptimizer or register_local_var() the "
    "layers or variables of the model that the copy trains."
)
SKIPPED = (
    "The argument {flag} tells the optimizer '{name}' that its gradients are summed already, but nothing in this "
    "process has summed them: ranks may train different models.\n"
    "HINT: leave the argument out, or call optimizer.aggregate_gradients() first."
)
# Keras 2's arguments of apply_gradients(), with the value that says that gradients are summed already.
_SUMMED = {"skip_gradients_aggregation": True, "experimental_aggregate_gradients": False}


class DistributedMixin:
    """The attributes of every distributed optimizer beside those of the wrapped class."""

    @property
    def process_set(self) -> Any:
        """The ranks among which gradients are reduced."""
        return getattr(type(self), SETTINGS).process_set

    def register_local_var(self, var: Any) -> None:
        """Leave the gradient of a variable to each rank.

        ``var`` is a variable of the model, of any shape; it may differ between ranks. Raises nothing for other models'.
        An optimizer with local variables has no deep copy and no pickle, and ``from_config`` makes one without them.

        Examples:
            >>> optimizer = hvd.DistributedOptimizer(optimizer)
            >>> optimizer.register_local_var(model.layers[0].bias)
        """
        step_of(self).local[id(var)] = var

    def __copy__(self) -> Any:
        """Return an optimizer that shares this one's variables and settings, and has the same local variables."""
        copied = wrap(self._hvdkit_plain(), step_of(self).settings)
        step_of(copied).local.update(step_of(self).local)
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        """Make a deep copy, or a pickle, by copying the plain optimizer and wrapping the copy.

        Raises TypeError where variables are local: the copy's model has other variables, which would be reduced.
        """
        if local := step_of(self).local:
            names = ", ".join(getattr(variable, "path", variable.name) for variable in local.values())
            raise TypeError(LOCAL_IN_COPY.format(names=names))
        return wrap, (self._hvdkit_plain(), step_of(self).settings)

    def _hvdkit_plain(self) -> Any:
        """Return an optimizer of the wrapped class with this optimizer's attributes."""
        plain: Any = object.__new__(type(self).__bases__[-1])
        vars(plain).update({key: value for key, value in vars(self).items() if key != STEP})
        return plain


def wrap(optimizer: Any, settings: KerasSettings) -> Any:
    """Return a distributed optimizer that shares its variables with ``optimizer``."""
    cls = _distributed_class(type(optimizer), settings)
    wrapped = object.__new__(cls)
    vars(wrapped).update(vars(optimizer))
    weakref.finalize(wrapped, _forget_name, cls)
    return wrapped


def _distributed_class(base: Any, settings: KerasSettings) -> Any:
    """Return a subclass of ``base`` with its name, so that saved models load where hvdkit is not installed."""

    def of_base(name: str) -> Any:
        return lambda self, *args, **options: getattr(base, name)(self, *args, **options)

    if issubclass(base, keras_2.optimizer_classes()):
        methods = {
            "apply_gradients": reducing_pairs_first(of_base("apply_gradients")),
            "aggregate_gradients": _aggregate_gradients,
            "_aggregate_gradients": _aggregate_gradients,  # the name in optimizers before 2.11
        }
    else:
        methods = {"apply": reducing_first(of_base("apply")), "scale_loss": scale_loss_and_begin(of_base("scale_loss"))}
    body = {name: getattr(base, name) for name in ("__qualname__", "__doc__", "__module__")}
    # TensorFlow's AutoGraph must not translate the methods when a training loop of the user's calls them.
    body |= {SETTINGS: settings, **{name: backend().as_written(method) for name, method in methods.items()}}
    cls = types.new_class(base.__name__, (DistributedMixin, base), exec_body=lambda space: space.update(body))
    for names in _saved_names():
        if base in names:  # Keras writes this name into saved models
            names[cls] = names[base]
    return cls


def _forget_name(cls: Any) -> None:
    for names in _saved_names():
        names.pop(cls, None)


def _saved_names() -> list[dict[Any, str]]:
    """Return the tables in which Keras 3 and 2 look up the names of their classes and of registered classes."""
    tables: list[dict[Any, str]] = []
    with suppress(ImportError):  # another layout of Keras: saved models name the module and class of base
        from keras.src import api_export
        from keras.src.saving import object_registration

        tables += [api_export.REGISTERED_OBJS_TO_NAMES, object_registration.GLOBAL_CUSTOM_NAMES]
    if keras_2.optimizer_classes():
        from tf_keras.src.saving import object_registration as of_keras_2

        tables.append(of_keras_2._GLOBAL_CUSTOM_NAMES)
    return tables


def reducing_first(of_class: Any) -> Any:
    """Return a method that reduces gradients and then calls ``of_class``, the ``apply`` of an optimizer of Keras 3.

    The optimizer is distributed, or may have a distributed optimizer inside.
    """

    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> None:
        """Reduce the gradients over all ranks, and update the variables. Collective."""
        step = None if WATCH.inside else distributed_step(self)  # inside: the optimizer around this one reduced them
        if step is None:
            of_class(self, grads, trainable_variables)
            return
        variables = self._trainable_variables if trainable_variables is None else list(trainable_variables)
        grads = list(grads)
        if len(grads) != len(variables):
            of_class(self, grads, trainable_variables)  # raises Keras's error
            return
        if not self.built and grads:
            # Here, outside of a graph's branches, where no variable can be made.
            self.build(variables)
            self.built = True
        step.prepare(self._trainable_variables)
        step.run(grads, variables, functools.partial(of_class, self))

    apply.reduces_first = True  # type: ignore[attr-defined]
    return apply


def reducing_pairs_first(of_class: Any) -> Any:
    """Return the same for ``apply_gradients`` of Keras 2, of optimizers before and since 2.11."""

    def apply_gradients(self: Any, grads_and_vars: Any, *args: Any, **options: Any) -> Any:
        """Reduce the gradients over all ranks, and update the variables. Collective."""
        pairs = list(grads_and_vars)
        step = None if WATCH.inside else distributed_step(self)
        if step is None or not pairs:
            return of_class(self, pairs, *args, **options)
        grads, variables = zip(*pairs, strict=True)
        flags = [f"{name}={value}" for name, value in _SUMMED.items() if bool(options.get(name, not value)) is value]
        if flags:
            if not any(map(is_marked, [*grads, *variables])):
                warnings.warn(SKIPPED.format(name=keras_2.name_of(self), flag=flags[0]), stacklevel=2)
            with backend().after(grads), WATCH.reduced():
                return of_class(self, pairs, *args, **options)
        import tensorflow as tf

        with tf.init_scope():  # in a graph no variable can be made
            step.prepare(variables)

        def update(reduced: list[Any], variables: list[Any]) -> None:
            of_class(self, list(zip(reduced, variables, strict=True)), *args, **options)

        step.run(grads, variables, update)
        return self.iterations

    return apply_gradients


def _aggregate_gradients(optimizer: Any, grads_and_vars: Any) -> list[tuple[Any, Any]]:
    """Reduce the gradients over all ranks, for apply_gradients(..., skip_gradients_aggregation=True)."""
    pairs = list(grads_and_vars)
    if WATCH.inside or not pairs:
        return pairs
    grads, variables = zip(*pairs, strict=True)
    reduced = step_of(optimizer).reduce(grads, variables)
    mark(variables)
    return list(zip(reduced, variables, strict=True))
