"""``overlap_forward``: an optimizer of Keras whose update is made variable by variable, each before its next use.

On PyTorch, and in Keras's own ``train_step``, where nothing of the user's reads gradients after ``apply()``. What the
update goes by, as the number of the step and the learning rate, is that of the step which it belongs to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hvdkit.api.gradients.guard import WATCH
from hvdkit.keras.backend import backend_name
from hvdkit.keras.keras_2 import is_keras_2
from hvdkit.keras.settings import FUNCTION

# Keras's own: each variable's update is computed from its own gradient and state alone.
BY_VARIABLE = ("SGD", "Adam", "AdamW", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Lion")
# What needs all gradients or variables at once, or counts calls.
_AT_ONCE = ("global_clipnorm", "use_ema", "gradient_accumulation_steps", "loss_scale_factor")
ARGUMENT = f"{FUNCTION}: argument overlap_forward:"
NOT_BY_VARIABLE = (
    f"{ARGUMENT} the update of {{name}} may need all gradients at once.\n"
    "HINT: use one of {known}, or leave overlap_forward out."
)
AT_ONCE = f"{ARGUMENT} {{option}} needs all gradients at once.\nHINT: leave one of the two out."
ON_TENSORFLOW = (
    f"{ARGUMENT} on TensorFlow variables do not say when they are used next.\n"
    "HINT: leave it out, or set KERAS_BACKEND=torch."
)
PASSES = f"{ARGUMENT} backward_passes_per_step=1 is expected, got {{passes}}\nHINT: leave one of the two out."


def check_overlap(optimizer: Any, passes: int) -> None:
    """Raise ValueError where updates cannot be made one by one."""
    if backend_name() != "torch" or is_keras_2(optimizer):
        raise ValueError(ON_TENSORFLOW)
    if not _is_known(type(optimizer)):
        raise ValueError(NOT_BY_VARIABLE.format(name=type(optimizer).__name__, known=", ".join(BY_VARIABLE)))
    if passes != 1:
        raise ValueError(PASSES.format(passes=passes))
    for option in _AT_ONCE:
        if getattr(optimizer, option, None):
            raise ValueError(AT_ONCE.format(option=option))


def _is_known(cls: type) -> bool:
    return cls.__module__.startswith("keras.src.") and cls.__name__ in BY_VARIABLE


@contextmanager
def _outside_of_layers() -> Iterator[None]:
    """Variables are themselves here, also where a layer that uses one has it cast, or its changes put off."""
    from keras.src.backend.common import global_state

    inside = {name: global_state.get_global_attribute(name) for name in ("autocast_scope", "stateless_scope")}
    try:
        for name in inside:
            global_state.set_global_attribute(name, None)
        yield
    finally:
        for name, scope in inside.items():
            global_state.set_global_attribute(name, scope)


class OneStep:
    """One step of a distributed optimizer, made for some variables after the others.

    ``numbers`` are variables of its own, kept from step to step: how many steps there were, and the learning rate.
    """

    def __init__(self, optimizer: Any, without: str, numbers: dict[str, Any]) -> None:
        self._base: Any = type(optimizer).__bases__[-1]
        self._optimizer = optimizer
        self._numbers = numbers
        self._step = int(optimizer._iterations)
        rate = optimizer._get_current_learning_rate()
        kept = {key: value for key, value in vars(optimizer).items() if key != without}
        kept["_iterations"] = self._number("_iterations", optimizer._iterations)
        kept["_learning_rate"] = self._number("_learning_rate", rate) if hasattr(rate, "assign") else rate
        plain: Any = object.__new__(self._base)
        plain.__dict__.update(kept)
        self._plain = plain

    @staticmethod
    def of(optimizer: Any, variables: Sequence[Any], without: str, numbers: dict[str, Any]) -> OneStep | None:
        """None where this step needs all gradients at once; ``without``: an attribute that is not the plain one's.

        Keras computes with numbers of the first variable's dtype, and a constraint may do anything.
        """
        may = _is_known(type(optimizer).__bases__[-1]) and optimizer.built
        may = may and not any(getattr(optimizer, option, None) for option in _AT_ONCE)
        may = may and len({str(one.dtype) for one in variables}) == 1
        may = may and all(getattr(one, "constraint", None) is None for one in variables)
        return OneStep(optimizer, without, numbers) if may else None

    def _number(self, name: str, like: Any) -> Any:
        """A variable with the value of another one."""
        import keras

        if name not in self._numbers:
            # Of zero, since one of a tensor would be that tensor.
            self._numbers[name] = keras.Variable(0, dtype=like.dtype, trainable=False, name="hvdkit_step")
        self._numbers[name].assign(like.value)
        return self._numbers[name]

    def count(self) -> None:
        """To everybody else the step has been made."""
        self._optimizer._iterations.assign_add(1)

    def update(self, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        """Make it for these variables."""
        with _outside_of_layers(), WATCH.reduced():
            self._numbers["_iterations"].assign(self._step)  # which Keras counts on after each of them
            self._base.apply(self._plain, list(gradients), list(variables))
