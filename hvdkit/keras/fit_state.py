"""The state of a Keras model, with the progress of ``fit``, for Keras 3 and tf_keras."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import keras
import numpy as np
import numpy.typing as npt

from hvdkit.api.states import BETWEEN_PASSES
from hvdkit.api.variables import VariablesState, stepped_by
from hvdkit.keras.functions import broadcast_variables
from hvdkit.keras.keras_2 import build, variables_of
from hvdkit.keras.step import distributed_step

COMMIT_LATER = "{passes} batches make a step of the optimizer: commit after {passes} batches or a multiple of that."


@dataclass
class FitProgress:
    """The progress of ``fit``, a part of the state. Its lists and arrays are replaced, never changed."""

    batches: int = 0  # of the present epoch that are done
    size: int = 1  # the number of ranks that ran these batches
    skipped: int = 0  # the batches that this call of ``fit`` only draws from the data
    steps: int = 0  # per execution, of a model of tf_keras; 0 between calls of ``fit``
    metrics: Sequence[npt.NDArray[Any]] | None = ()  # the values of the epoch's metrics; None: the model has newer ones
    history: dict[str, list[Any]] | None = None  # of the epochs that are done; None between calls of ``fit``
    epochs: list[int] = field(default_factory=list)  # the epochs of the history

    def __deepcopy__(self, memo: dict[int, Any]) -> FitProgress:
        """Return a copy that shares the lists and arrays."""
        return replace(self)


class FitState(VariablesState):
    """A state that keeps the progress of ``fit`` for the callbacks."""

    model: Any
    optimizer: Any
    _fit_progress: FitProgress

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(_fit_progress=FitProgress(), **kwargs)

    def _check_passes(self) -> None:
        step = distributed_step(self.optimizer)
        if step is not None and step.is_between_passes():
            hint = COMMIT_LATER.format(passes=step.settings.backward_passes_per_step)
            raise ValueError(BETWEEN_PASSES.format(hint=hint))

    def save(self) -> None:
        self._check_passes()
        if self._fit_progress.metrics is None:
            self._fit_progress.metrics = [np.array(self._array(each)) for each in metric_variables(self.model)]
        super().save()

    def restore(self) -> None:
        super().restore()
        if (step := distributed_step(self.optimizer)) is not None:
            step.forget_passes()

    def _stepped(self) -> tuple[int, Collection[int]]:
        return stepped_by(self.optimizer, self.model)


class KerasState(FitState):
    """The state of a Keras model, its optimizer, and its metrics and history in ``fit``.

    Args:
        model: a model that is built.
        optimizer: by default that with which the model was compiled.
        backend: ignored, as in Horovod since TensorFlow 2.
        kwargs: any objects that can be copied and pickled, as ``batch=0, epoch=0``; they are attributes.

    Raises:
        ValueError: the model is not built.
    """

    def __init__(self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any) -> None:
        if not model.built:
            raise ValueError("KerasState: the model is not built.\nHINT: call model.build(input_shape) first.")
        self.model, self.optimizer = model, optimizer or getattr(model, "optimizer", None)
        if self.optimizer is not None:
            build(self.optimizer, model.trainable_variables)
        super().__init__(**kwargs)

    def _variables(self) -> list[Any]:
        return [*self.model.variables, *variables_of(self.optimizer)]

    def _array(self, variable: Any) -> npt.NDArray[Any]:
        array: npt.NDArray[Any] = keras.ops.convert_to_numpy(variable)
        return array

    def _broadcast(self, variables: list[Any]) -> None:
        broadcast_variables(variables, root_rank=0)


def metric_variables(model: Any) -> list[Any]:
    """Return the variables of a model's metrics, in their order."""
    return [variable for metric in model.metrics for variable in metric.variables]


def assign_metrics(model: Any, values: Sequence[npt.NDArray[Any]]) -> bool:
    """Return True if the metrics of a model have the variables for these values."""
    variables = metric_variables(model)
    if [tuple(each.shape) for each in variables] != [each.shape for each in values]:
        return False
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)
    return True
