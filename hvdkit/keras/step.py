"""An optimizer's step: gradients of several backward passes added up, reduced, and handed to the wrapped optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hvdkit.api.backends import Gradients
from hvdkit.api.gradients.guard import WATCH
from hvdkit.engine.session import runtime
from hvdkit.keras.backend import adapter, backend
from hvdkit.keras.overlap import OneStep
from hvdkit.keras.settings import OptimizerSettings
from hvdkit.kernels.reduce_op import ReduceOp

# Attributes of a distributed optimizer's class, and of the optimizer.
SETTINGS = "_hvdkit_settings"
STEP = "_hvdkit_step"

Apply = Callable[[list[Any], list[Any]], None]


class DistributedStep:
    """What stands between the gradients of one optimizer and its update."""

    def __init__(self, settings: OptimizerSettings) -> None:
        self.settings = settings
        self.local: dict[int, Any] = {}
        self._gradients: Gradients | None = None
        self.may_begin = False  # a step's backward pass, which has not begun
        self._accumulators: dict[int, Any] = {}  # by the variable's id
        self._passes: Any = None
        self._touched: set[int] = set()  # ids of variables with a gradient since the last update
        self._numbers: dict[str, Any] = {}  # of the step that is made later

    def register_local(self, variable: Any) -> None:
        """Leave the gradient of a variable to each rank."""
        self.local[id(variable)] = variable

    def prepare(self, variables: Sequence[Any]) -> None:
        """Make what adds up the gradients of variables, if n passes make a step: in a graph it cannot be made later."""
        if self.settings.backward_passes_per_step == 1:
            return
        import keras

        if self._passes is None:
            self._passes = keras.Variable(0, dtype="int32", trainable=False, name="hvdkit_passes")
        for variable in variables:
            if id(variable) not in self._accumulators:
                self._accumulators[id(variable)] = keras.Variable(
                    keras.initializers.Zeros(),
                    shape=tuple(variable.shape),
                    dtype=keras.backend.standardize_dtype(variable.dtype),
                    trainable=False,
                    name="hvdkit_accumulated",
                )

    def run(self, gradients: Sequence[Any], variables: Sequence[Any], apply: Apply, optimizer: Any = None) -> None:
        """Call ``apply`` with reduced gradients and their variables; after every n-th call, if n passes make a step.

        ``optimizer``: whose update may be made later, if somebody asked for that.
        """
        gradients, variables = list(gradients), list(variables)
        if self.settings.backward_passes_per_step == 1:
            if not self._leave_to_background(gradients, variables, optimizer):
                self._apply(gradients, variables, apply)
            return
        with backend().after(gradients):
            self._add_up(gradients, variables, apply)

    def _add_up(self, gradients: list[Any], variables: list[Any], apply: Apply) -> None:
        """Add the gradients of one pass to those of the passes before it; the last one makes the step."""
        import keras

        for gradient, variable in zip(gradients, variables, strict=True):
            if gradient is None:
                continue
            held, gradient = self._accumulators[id(variable)], keras.ops.convert_to_tensor(gradient, sparse=False)
            held.assign(keras.ops.maximum(held, gradient) if is_overwritten(variable) else held + gradient)
            self._touched.add(id(variable))
        passes = self.settings.backward_passes_per_step
        self._passes.assign(keras.ops.mod(self._passes + 1, passes))

        def update() -> None:
            scale = passes if self.settings.average_aggregated_gradients else 1
            # Also what had a gradient in an earlier one of the passes only.
            used = [self._accumulators[id(one)] if id(one) in self._touched else None for one in variables]
            total = [
                None if one is None else keras.ops.convert_to_tensor(one) / (1 if is_overwritten(variable) else scale)
                for one, variable in zip(used, variables, strict=True)
            ]
            self._touched.clear()
            self._apply(total, variables, apply)
            for one in used:
                if one is not None:
                    one.assign(keras.ops.zeros_like(one))

        # The optimizer counts updates, not passes: its averages and corrections of bias go by that.
        keras.ops.cond(keras.ops.equal(self._passes, 0), update, lambda: None)

    def _leave_to_background(self, gradients: list[Any], variables: list[Any], optimizer: Any) -> bool:
        """Begin a step whose updates are made when variables are needed. Returns whether that can be."""
        if self._gradients is None or not is_distributed(optimizer):
            return False
        if self.local or any(map(is_overwritten, variables)):
            return False
        self.complete()
        later = OneStep.of(optimizer, variables, STEP, self._numbers)
        if later is None or not self._gradients.reduce_later(gradients, variables, later.update):
            return False
        later.count()
        return True

    def complete(self) -> None:
        """Make what is left of the last step's update."""
        if self._gradients is not None:
            self._gradients.complete()

    def _apply(self, gradients: list[Any], variables: list[Any], apply: Apply) -> None:
        reduced = self.reduce(gradients, variables)
        # The optimizer counts its updates too, and that does not depend on gradients.
        with backend().after(reduced), WATCH.reduced():
            apply(reduced, variables)

    @contextmanager
    def in_train_step(self) -> Iterator[None]:
        """Keras's own ``train_step`` runs in this context."""
        self.may_begin = self._gradients is not None and self.settings.backward_passes_per_step == 1
        try:
            yield
        finally:
            self.may_begin = False
            if self._gradients is not None:
                self._gradients.end_backward()

    def begin_backward(self) -> None:
        """The backward pass of Keras's own ``train_step`` begins: its gradients may travel as they become complete."""
        self.may_begin = False
        if self._gradients is not None:
            self._gradients.begin_backward(self.local.values())

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """The gradients of variables, reduced over all ranks. Collective."""
        if self._gradients is None:
            self._gradients = backend().gradients(self.settings)
        replaced = [
            index
            for index, (gradient, variable) in enumerate(zip(gradients, variables, strict=True))
            if gradient is not None and is_overwritten(variable) and id(variable) not in self.local
        ]
        others = [None if index in replaced else gradient for index, gradient in enumerate(gradients)]
        reduced = self._gradients.reduce(others, variables, self.local)
        for index, value in zip(replaced, self._largest([gradients[index] for index in replaced]), strict=True):
            reduced[index] = value
        return reduced

    def _largest(self, values: list[Any]) -> list[Any]:
        """The elementwise largest of all ranks."""
        process_set = self.settings.process_set
        if not values or not process_set.included():
            return values
        name = f"{self.settings.label(runtime.engine())}.overwritten"
        largest = adapter().grouped_allreduce(values, name=name, op=ReduceOp.MAX, process_set=process_set)
        return list(largest)


def is_distributed(optimizer: Any) -> bool:
    """True for what ``DistributedOptimizer`` returned."""
    return hasattr(type(optimizer), SETTINGS)


def distributed_step(optimizer: Any) -> DistributedStep | None:
    """What reduces the gradients of an optimizer, or of the one that its loss scale is around; None if nothing does."""
    if is_distributed(optimizer):
        return step_of(optimizer)
    inner = getattr(optimizer, "inner_optimizer", None)
    return None if inner is None else distributed_step(inner)


def step_of(optimizer: Any) -> DistributedStep:
    """The step of a distributed optimizer."""
    step: DistributedStep | None = vars(optimizer).get(STEP)
    if step is None:  # made by from_config
        step = vars(optimizer)[STEP] = DistributedStep(getattr(type(optimizer), SETTINGS))
    return step


def is_overwritten(variable: Any) -> bool:
    """Whether a variable's gradient is no gradient but its next value, as the scales of float8 layers are.

    Keras takes the largest of several.
    """
    return bool(getattr(variable, "overwrite_with_gradient", False))
