"""An optimizer's step: gradients of several backward passes added up, reduced, and handed to the wrapped optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from hvdkit.api.guard import WATCH
from hvdkit.keras.backend import backend
from hvdkit.keras.settings import OptimizerSettings

Apply = Callable[[list[Any], list[Any]], None]


class Gradients(Protocol):
    """Reduces the gradients of one backend."""

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any], local: Any) -> list[Any]:
        """The gradients as all ranks have them."""
        ...


class DistributedStep:
    """What stands between the gradients of one optimizer and its update."""

    def __init__(self, settings: OptimizerSettings) -> None:
        self.settings = settings
        self._local: dict[int, Any] = {}
        self._gradients: Gradients | None = None
        self._accumulators: dict[int, Any] = {}  # by the variable's id
        self._passes: Any = None

    def register_local(self, variable: Any) -> None:
        """Leave the gradient of a variable to each rank."""
        self._local[id(variable)] = variable

    def run(self, optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any], apply: Apply) -> None:
        """Call ``apply`` with reduced gradients and their variables; after every n-th call, if n passes make a step."""
        gradients, variables = list(gradients), list(variables)
        if self.settings.backward_passes_per_step == 1:
            self._apply(gradients, variables, apply)
            return
        import keras

        accumulators = self._accumulate(gradients, variables)
        passes = self.settings.backward_passes_per_step
        self._passes.assign(keras.ops.mod(self._passes + 1, passes))

        def update() -> None:
            scale = passes if self.settings.average_aggregated_gradients else 1
            total = [None if one is None else keras.ops.convert_to_tensor(one) / scale for one in accumulators]
            self._apply(total, variables, apply)
            for one in accumulators:
                if one is not None:
                    one.assign(keras.ops.zeros_like(one))

        def skip() -> None:
            optimizer.iterations.assign_add(1)

        keras.ops.cond(keras.ops.equal(self._passes, 0), update, skip)

    def _apply(self, gradients: list[Any], variables: list[Any], apply: Apply) -> None:
        if self._gradients is None:
            self._gradients = _gradients(self.settings)
        reduced = self._gradients.reduce(gradients, variables, self._local)
        with WATCH.reduced():
            apply(reduced, variables)

    def _accumulate(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Add gradients to what was added up before; the variables that hold it, None where there is no gradient."""
        import keras

        if self._passes is None:
            self._passes = keras.Variable(0, dtype="int32", trainable=False, name="hvdkit_passes")
        held: list[Any] = []
        for gradient, variable in zip(gradients, variables, strict=True):
            if gradient is None:
                held.append(None)
                continue
            if id(variable) not in self._accumulators:
                self._accumulators[id(variable)] = keras.Variable(
                    keras.initializers.Zeros(),
                    shape=tuple(variable.shape),
                    dtype=keras.backend.standardize_dtype(gradient.dtype),
                    trainable=False,
                    name="hvdkit_accumulated",
                )
            accumulator = self._accumulators[id(variable)]
            accumulator.assign_add(keras.ops.convert_to_tensor(gradient, sparse=False))
            held.append(accumulator)
        return held


def _gradients(settings: OptimizerSettings) -> Gradients:
    if backend() == "tensorflow":
        from hvdkit.keras.tensorflow_gradients import TensorFlowGradients

        return TensorFlowGradients(settings)
    from hvdkit.keras.torch_gradients import TorchGradients

    return TorchGradients(settings)
