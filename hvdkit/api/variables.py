"""The state of variables of TensorFlow or Keras."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdkit.api.objects import broadcast_object
from hvdkit.api.states import ObjectState
from hvdkit.engine.session import runtime


class VariablesState(ObjectState):
    """The state of variables of TensorFlow or Keras, copied into memory that is used again, and of Python objects.

    A script that commits directly after each step of the optimizer has no copies of the variables that this changes.
    """

    def __init__(self, **kwargs: Any) -> None:
        self._arrays: list[npt.NDArray[Any] | None] = []  # None: not copied
        self._iterations = 0  # of the optimizer, when the state was saved
        super().__init__(broadcast_object, lambda: runtime.topology().rank, **kwargs)
        self.save()

    @abstractmethod
    def _variables(self) -> list[Any]:
        """Return the variables, in the same order on all ranks."""

    @abstractmethod
    def _array(self, variable: Any) -> npt.NDArray[Any]:
        """Return the value of a variable."""

    @abstractmethod
    def _broadcast(self, variables: list[Any]) -> None:
        """Give all ranks the values of rank 0."""

    def _stepped(self) -> tuple[int, Collection[int]]:
        """Return the optimizer's count of steps, and the ids of the variables that these change, all or none."""
        return 0, ()

    def _steps(self) -> list[int]:
        return [self._stepped()[0] - self._iterations]

    def save(self) -> None:
        self._iterations, stepped = self._stepped()
        uncopied = () if self._needs_copy() or not self._can_send() else stepped
        self._is_copied = not uncopied
        variables = self._variables()
        if len(self._arrays) != len(variables):
            self._arrays = [None] * len(variables)
        for number, variable in enumerate(variables):
            self._arrays[number] = (
                None if id(variable) in uncopied else _copied(self._array(variable), self._arrays[number])
            )
        super().save()

    def restore(self) -> None:
        self._tell_of_kept_steps()
        for variable, array in zip(self._variables(), self._arrays, strict=True):
            if array is not None:
                variable.assign(array)
        super().restore()

    def sync(self) -> None:
        self._broadcast(self._variables())
        super().sync()
        self.save()

    def _can_send(self) -> bool:
        return type(self).sync is VariablesState.sync

    def _content(self) -> Any:
        return self._attributes(), [self._array(variable) for variable in self._variables()]

    def _take(self, content: Any) -> None:
        attributes, arrays = content
        for variable, array in zip(self._variables(), arrays, strict=True):
            variable.assign(array)
        self._set(attributes)
        self.save()


def stepped_by(optimizer: Any, model: Any) -> tuple[int, Collection[int]]:
    """Return the count of an optimizer's steps, and the ids of the variables that it alone changes, all or none.

    Optimizers of Keras 2 or 3; of those that may skip a step, as that which scales the loss, or that add up gradients
    of several, no variables.
    """
    accumulates = getattr(optimizer, "gradient_accumulation_steps", None)
    if not hasattr(optimizer, "iterations") or hasattr(optimizer, "inner_optimizer") or accumulates:
        return 0, ()
    variables = optimizer.variables() if callable(optimizer.variables) else optimizer.variables
    ids = {id(each) for each in (*model.trainable_variables, *variables)}
    ids.discard(id(getattr(optimizer, "_learning_rate", None)))
    return int(optimizer.iterations.numpy()), ids


def _copied(array: npt.NDArray[Any], kept: npt.NDArray[Any] | None) -> npt.NDArray[Any]:
    """Return a copy of an array, in the memory of an earlier copy where that fits."""
    if kept is None or (kept.shape, kept.dtype) != (array.shape, array.dtype):
        return np.array(array)
    np.copyto(kept, array)
    return kept
