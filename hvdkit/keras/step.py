"""The step of a distributed optimizer: gradients of one or more backward passes are reduced and then applied.

On PyTorch gradients travel during the backward pass of Keras's own ``train_step``, where only that pass comes between
``optimizer.scale_loss()`` and ``optimizer.apply()``: 10 to 27 % of a step less between two hosts at 1 Gb/s. A user's
loop may call ``backward()`` several times and change gradients before it applies them; there, ``apply`` reduces.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import keras

from hvdkit.api.backends import OptimizerGradients
from hvdkit.api.gradients.guard import WATCH
from hvdkit.api.gradients.settings import GradientSettings
from hvdkit.engine.session import runtime
from hvdkit.engine.session.process_sets import global_process_set
from hvdkit.keras.functions import adapter, backend
from hvdkit.kernels.reduce_op import ReduceOp

DISTRIBUTED_BY_KERAS = (
    "DistributedOptimizer {title!r} on rank {rank}: keras.distribution has {kind} set, which reduces gradients over "
    "its own processes; the gradients would be averaged twice.\n"
    "HINT: call keras.distribution.set_distribution(None) before the model is made, or give the model the optimizer "
    "without hvd.DistributedOptimizer."
)

# Attributes of a distributed optimizer's class, and of the optimizer.
SETTINGS = "_hvdkit_settings"
STEP = "_hvdkit_step"

Apply = Callable[[list[Any], list[Any]], None]


@dataclass(frozen=True)
class KerasSettings(GradientSettings):
    """The checked arguments of a DistributedOptimizer."""

    average_aggregated_gradients: bool = False

    def __deepcopy__(self, memo: dict[int, Any]) -> KerasSettings:
        """Return the same settings with a pairing of their own; the process set is shared, not copied."""
        return replace(self, pairing=copy.copy(self.pairing))

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields. Raises TypeError unless the process set is that of all ranks, which every process has."""
        if self.process_set is not global_process_set:
            raise TypeError("DistributedOptimizer: only an optimizer with the process set of all ranks can be pickled")
        return vars(self)


class DistributedStep:
    """The state between the gradients of one optimizer and its update."""

    def __init__(self, settings: KerasSettings) -> None:
        self.settings = settings
        self.local: dict[int, Any] = {}  # by id, the variables whose gradients stay this rank's
        self._gradients: OptimizerGradients | None = None
        self._awaits_backward = False  # inside of Keras's own train_step, before its backward pass
        self._accumulators: dict[int, Any] = {}  # by the variable's id
        self._passes: Any = None
        self._touched: set[int] = set()  # ids of variables with a gradient since the last update

    def prepare(self, variables: Sequence[Any]) -> None:
        """Make the accumulators of variables, if several passes make a step: inside of a graph it would be too late."""
        if self.settings.backward_passes_per_step == 1:
            return
        if self._passes is None:
            self._passes = keras.Variable(0, dtype="int32", trainable=False, name="hvdkit_passes")
        for variable in variables:
            if id(variable) not in self._accumulators:
                dtype = keras.backend.standardize_dtype(variable.dtype)
                options = {"shape": tuple(variable.shape), "dtype": dtype, "name": "hvdkit_accumulated"}
                zeros = keras.Variable(keras.initializers.Zeros(), trainable=False, **options)
                self._accumulators[id(variable)] = zeros

    def is_between_passes(self) -> bool:
        """True if some, and not all, of a step's passes are done."""
        return self._passes is not None and int(keras.ops.convert_to_numpy(self._passes)) > 0

    def forget_passes(self) -> None:
        """Begin a step anew, after a failure in it."""
        if self._passes is not None:
            for variable in (self._passes, *self._accumulators.values()):
                variable.assign(keras.ops.zeros_like(variable))
            self._touched.clear()

    def run(self, gradients: Sequence[Any], variables: Sequence[Any], apply: Apply) -> None:
        """Call ``apply`` with reduced gradients and their variables; if n passes make a step, in every n-th call."""
        if self.settings.backward_passes_per_step == 1:
            self._apply(list(gradients), list(variables), apply)
        else:
            with backend().after(gradients):
                self._accumulate(list(gradients), list(variables), apply)

    def _accumulate(self, gradients: list[Any], variables: list[Any], apply: Apply) -> None:
        """Add the gradients of one pass to the accumulators; the last pass of a step makes the update."""
        for gradient, variable in zip(gradients, variables, strict=True):
            if gradient is None:
                continue
            total = self._accumulators[id(variable)]
            gradient = keras.ops.convert_to_tensor(gradient, sparse=False)
            total.assign(keras.ops.maximum(total, gradient) if is_overwritten(variable) else total + gradient)
            self._touched.add(id(variable))
        passes = self.settings.backward_passes_per_step
        self._passes.assign(keras.ops.mod(self._passes + 1, passes))

        def update() -> None:
            divisor = passes if self.settings.average_aggregated_gradients else 1
            scaled: list[Any] = [None] * len(variables)
            # Also of variables that had a gradient only in an earlier pass.
            totals = {i: self._accumulators[id(each)] for i, each in enumerate(variables) if id(each) in self._touched}
            for index, total in totals.items():
                by = 1 if is_overwritten(variables[index]) else divisor
                scaled[index] = keras.ops.convert_to_tensor(total) / by
            self._touched.clear()
            self._apply(scaled, variables, apply)
            for total in totals.values():
                total.assign(keras.ops.zeros_like(total))

        # The optimizer counts updates, not passes: its averages and bias corrections depend on that number.
        keras.ops.cond(keras.ops.equal(self._passes, 0), update, lambda: None)

    def _apply(self, gradients: list[Any], variables: list[Any], apply: Apply) -> None:
        reduced = self.reduce(gradients, variables)
        # The optimizer also counts its updates, and that operation does not depend on gradients.
        with backend().after(reduced), WATCH.reduced():
            apply(reduced, variables)

    @contextmanager
    def in_train_step(self) -> Iterator[None]:
        """Run Keras's own ``train_step`` in this context."""
        self._awaits_backward = self._gradients is not None and self.settings.backward_passes_per_step == 1
        try:
            yield
        finally:
            self._awaits_backward = False
            if self._gradients is not None:
                self._gradients.end_backward()

    def begin_backward(self) -> None:
        """Let gradients travel as they become complete, if this is the backward pass of Keras's own ``train_step``."""
        if self._awaits_backward and self._gradients is not None:
            self._awaits_backward = False
            self._gradients.begin_backward(self.local.values())

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return the gradients of variables, reduced over all ranks. Collective."""
        if self._gradients is None:
            if (distribution := keras.distribution.distribution()) is not None:
                title, kind = self.settings.title, type(distribution).__name__
                raise ValueError(DISTRIBUTED_BY_KERAS.format(title=title, rank=runtime.topology().rank, kind=kind))
            self._gradients = backend().gradients(self.settings)
        values = {
            index: gradient
            for index, (gradient, variable) in enumerate(zip(gradients, variables, strict=True))
            if gradient is not None and is_overwritten(variable) and id(variable) not in self.local
        }
        added = [None if index in values else gradient for index, gradient in enumerate(gradients)]
        reduced = self._gradients.reduce(added, variables, self.local)
        process_set = self.settings.process_set
        if values and process_set.included():
            name = f"{self.settings.label(runtime.engine())}.overwritten"
            own = list(values.values())
            largest = adapter().grouped_allreduce(own, name=name, op=ReduceOp.MAX, process_set=process_set)
            values = dict(zip(values, largest, strict=True))
        return [values.get(index, gradient) for index, gradient in enumerate(reduced)]


def is_distributed(optimizer: Any) -> bool:
    """True if ``DistributedOptimizer`` returned this optimizer."""
    return hasattr(type(optimizer), SETTINGS)


def distributed_step(optimizer: Any) -> DistributedStep | None:
    """Return the step of an optimizer, or of the optimizer inside of its loss scale; None if neither is distributed."""
    if is_distributed(optimizer):
        return step_of(optimizer)
    inner = getattr(optimizer, "inner_optimizer", None)
    return None if inner is None else distributed_step(inner)


def step_of(optimizer: Any) -> DistributedStep:
    """Return the step of a distributed optimizer."""
    step: DistributedStep | None = vars(optimizer).get(STEP)
    if step is None:  # made by from_config
        step = vars(optimizer)[STEP] = DistributedStep(getattr(type(optimizer), SETTINGS))
    return step


def is_overwritten(variable: Any) -> bool:
    """True if a variable's gradient is its next value, as for the scales of float8 layers. Keras takes the largest."""
    return bool(getattr(variable, "overwrite_with_gradient", False))


_own_code: Any = None  # of Keras's own train_step


def train_step_with_backward(train_step: Any) -> Any:
    """Return Keras's ``TorchTrainer.train_step``, run in the step of the model's distributed optimizer."""
    import torch
    from keras.src.backend.torch import trainer

    global _own_code
    original = inspect.unwrap(train_step)
    if getattr(original, "__module__", None) == trainer.__name__:  # not another package's replacement
        _own_code = getattr(original, "__code__", None)

    def train_step_with(self: Any, data: Any) -> Any:
        step = None if torch.compiler.is_compiling() else _reducing_step(getattr(self, "optimizer", None))
        if step is None:
            return train_step(self, data)
        with step.in_train_step():
            return train_step(self, data)

    return train_step_with


def scale_loss_and_begin(of_class: Any) -> Any:
    """Return ``scale_loss`` of an optimizer that is distributed, or may be a loss scale around a distributed one."""

    def scale_loss(self: Any, loss: Any) -> Any:
        """Return the loss, scaled as by the optimizer's class."""
        scaled = of_class(self, loss)
        # Keras's own train_step calls scale_loss() just before its backward pass.
        step = _reducing_step(self) if sys._getframe(1).f_code is _own_code else None
        if step is not None:
            step.begin_backward()
        return scaled

    return scale_loss


def _reducing_step(optimizer: Any) -> DistributedStep | None:
    """Return the optimizer's step, if ``apply`` hands it gradients unchanged; None if a user has replaced ``apply``."""
    reduces_first = getattr(getattr(type(optimizer), "apply", None), "reduces_first", False)
    return distributed_step(optimizer) if reduces_first and "apply" not in vars(optimizer) else None
