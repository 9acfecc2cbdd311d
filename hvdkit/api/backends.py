"""The interface between Keras and the adapter of the framework under it, which is in its module ``for_keras``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from hvdkit.api.gradients.settings import GradientSettings

# The adapters by Keras's names for their frameworks. Each has ``BACKEND``, a Backend, in ``for_keras``.
ADAPTERS = {"tensorflow": "hvdkit.tensorflow", "torch": "hvdkit.torch"}

# Makes a context in which a graph runs operations after tensors (None is left out) and after the data of its step.
After = Callable[[Sequence[Any]], AbstractContextManager[None]]


class OptimizerGradients(ABC):
    """The gradients of one optimizer. Some may travel before ``reduce`` is called, during the backward pass."""

    @abstractmethod
    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any], local: Collection[int]) -> list[Any]:
        """Return the gradients as reduced over all ranks of the process set; None stays None.

        ``local`` are ids of variables whose gradients stay this rank's. Collective: every rank has gradients for the
        same variables. Raises HorovodInternalError on every rank where ranks disagree.
        """

    def begin_backward(self, local: Collection[Any]) -> None:
        """Begin a backward pass whose gradients all reach ``reduce`` unchanged; ``local``: the local variables."""

    def end_backward(self) -> None:
        """End the step of this backward pass, also after a failure."""


@dataclass(frozen=True)
class Backend:
    """An adapter, as Keras uses it."""

    tensor: Callable[[Any], Any]  # converts a value to a tensor
    gradients: Callable[[GradientSettings], OptimizerGradients]  # of an optimizer with these settings
    # Writes a root's values into Keras variables. Raises ValueError for variables without values, HorovodInternalError
    # on every rank where ranks disagree.
    broadcast_variables: Callable[[Sequence[Any], int], None]
    as_written: Callable[[Any], Any]  # returns the function, marked so that the framework does not translate it
    after: After
