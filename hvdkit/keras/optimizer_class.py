"""The class of a distributed optimizer: the user's class, which reduces gradients before it updates.

The class of a wrapped optimizer is a subclass of the user's, with its name, whose ``apply`` reduces first
(``keras/optimizer_class``); it shares the optimizer's variables and is saved under the optimizer's own name. A loss
scale must decide alike on all ranks, so gradients are reduced before it looks at them, whether it is inside or around.
Every other optimizer of Keras warns at its first step where nobody reduces its gradients (``keras/unwrapped``,
installed by ``init()``, or when Keras is imported after it): Horovod on Keras 3 trained so without a word. Whether
somebody does, ``api/gradients/guard`` knows: variables whose gradients a tape reduced, tensors that an allreduce
returned. Passes that are added up are no updates: ``iterations`` counts updates, as in one process with larger batches.
Values that replace a variable (``overwrite_with_gradient``) are reduced to the largest. On PyTorch gradients travel
during the backward pass of Keras's own ``train_step`` (``keras/early``): only that pass comes between its call of
``optimizer.scale_loss()`` and ``optimizer.apply()``, whoever wrote these two. A loop or a ``train_step`` of one's own
may reach other models' parameters, make several passes and change gradients in any way; there, in what goes by name,
and where a hook of the user's comes after ours or a gradient becomes complete twice (the first backward pass on a plan
is only looked at, ``torch/for_keras_hooks``), they are reduced by ``apply``. An exception in such a step gives it up
without waiting for anybody: the lane fails on all ranks, in that step, or in the next one where a rank had all that it
needed, and they agree anew. Replaced in Keras, all by ``unwrapped.install()``, is what has no hook: ``apply`` of every
optimizer (the warning) and of ``LossScaleOptimizer`` (``apply_gradients`` in Keras 2), what ``jit_compile="auto"``
decides, since XLA cannot compile operations of ours, and on PyTorch ``TorchTrainer.train_step`` and
``LossScaleOptimizer.scale_loss``, which say when that backward pass begins and ends; a distributed optimizer has a
``scale_loss`` of its own.
"""

from __future__ import annotations

import types
import weakref
from typing import Any

from hvdkit.keras import keras_2
from hvdkit.keras.applying import aggregate_gradients, reducing_first, reducing_pairs_first
from hvdkit.keras.backend import backend
from hvdkit.keras.early import scale_loss_and_begin
from hvdkit.keras.settings import OptimizerSettings
from hvdkit.keras.step import SETTINGS, STEP, step_of

LOCAL_IN_COPY = (
    "A distributed optimizer that leaves variables to each rank ({names}) has no deep copy and no pickle: these are "
    "variables of its own model, and a copy would reduce those of another one.\n"
    "HINT: copy the optimizer before it is wrapped, and give PartialDistributedOptimizer or register_local_var() the "
    "layers or variables of the model that the copy trains."
)


class Distributed:
    """What every distributed optimizer has beside what its own class has."""

    @property
    def process_set(self) -> Any:
        """The ranks among which gradients are reduced."""
        return getattr(type(self), SETTINGS).process_set

    @property
    def variables(self) -> Any:
        """The optimizer's own, as the last step leaves them."""
        step: Any = vars(self).get(STEP)
        if step is not None:
            step.complete()
        return super().variables  # type: ignore[misc]  # the other base has them

    def set_weights(self, weights: Any) -> None:
        """See Keras; what is left of the last step comes first."""
        step_of(self).complete()
        super().set_weights(weights)  # type: ignore[misc]

    def register_local_var(self, var: Any) -> None:
        """Leave the gradient of a variable to each rank.

        Args:
            var: a variable of the model, of any shape; it may differ between ranks. Raises nothing for one of
                another model. An optimizer with local variables has no deep copy and no pickle, and what
                ``from_config`` makes of it knows none of them.

        Examples:
            >>> optimizer = hvd.DistributedOptimizer(optimizer)
            >>> optimizer.register_local_var(model.layers[0].bias)
        """
        step_of(self).register_local(var)

    def __copy__(self) -> Any:
        """Return an optimizer that shares this one's variables and settings, and leaves the same variables to ranks."""
        copied = wrap(self._hvdkit_plain(), step_of(self).settings)
        step_of(copied).local.update(step_of(self).local)
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        """Of a deep copy, or a pickle: that of the plain optimizer, wrapped again.

        Raises TypeError where variables are local: those of the copy's model are others, and would be reduced.
        """
        if local := step_of(self).local:
            names = ", ".join(getattr(one, "path", one.name) for one in local.values())
            raise TypeError(LOCAL_IN_COPY.format(names=names))
        return wrap, (self._hvdkit_plain(), step_of(self).settings)

    def _hvdkit_plain(self) -> Any:
        """Return the optimizer under its own class, with this one's attributes as the last step leaves them."""
        step_of(self).complete()
        plain: Any = object.__new__(type(self).__bases__[-1])
        vars(plain).update({key: value for key, value in vars(self).items() if key != STEP})
        return plain


def wrap(optimizer: Any, settings: OptimizerSettings) -> Any:
    """A distributed optimizer that shares its variables with ``optimizer``."""
    cls = distributed_class(type(optimizer), settings)
    wrapped = object.__new__(cls)
    vars(wrapped).update(vars(optimizer))
    weakref.finalize(wrapped, _forget_name, cls)
    return wrapped


def distributed_class(base: Any, settings: OptimizerSettings) -> Any:
    """A subclass of ``base`` with its name, also in saved models: they load where there is no hvdkit."""
    names = {name: getattr(base, name) for name in ("__qualname__", "__doc__", "__module__")}
    # TensorFlow's AutoGraph leaves them, where it comes upon them in a training loop of the user's.
    methods = {name: backend().as_written(method) for name, method in _methods(base).items()}
    body = {**names, SETTINGS: settings, **methods}
    cls = types.new_class(base.__name__, (Distributed, base), exec_body=lambda space: space.update(body))
    _save_as(cls, base)
    return cls


def _methods(base: Any) -> dict[str, Any]:
    """What a distributed optimizer does in place of what ``base`` does."""

    def of_base(name: str) -> Any:
        return lambda self, *args, **options: getattr(base, name)(self, *args, **options)

    if not issubclass(base, keras_2.optimizer_classes()):
        return {
            "apply": reducing_first(of_base("apply")),
            "scale_loss": scale_loss_and_begin(of_base("scale_loss")),
        }
    return {
        "apply_gradients": reducing_pairs_first(of_base("apply_gradients")),
        "aggregate_gradients": aggregate_gradients,
        "_aggregate_gradients": aggregate_gradients,  # as optimizers before 2.11 call it
    }


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
        return keras_2.saved_names()
    return [
        api_export.REGISTERED_OBJS_TO_NAMES,
        object_registration.GLOBAL_CUSTOM_NAMES,
        *keras_2.saved_names(),
    ]
