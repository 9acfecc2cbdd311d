"""The interface of an adapter for Keras: its module ``for_keras`` has a ``Backend``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from hvdkit.api.gradients.settings import GradientSettings

# The adapters by the names that Keras gives their frameworks. Each has ``BACKEND``, a Backend, in ``for_keras``.
ADAPTERS = {"tensorflow": "hvdkit.tensorflow", "torch": "hvdkit.torch"}

# Makes the update of some variables by their reduced gradients.
Update = Callable[[Sequence[Any], Sequence[Any]], None]

# Makes a context in which a graph orders all after tensors (None is left out) and after the data of its step.
After = Callable[[Sequence[Any]], AbstractContextManager[None]]


class Gradients(ABC):
    """The gradients of one optimizer. Some may travel before ``reduce`` is called, during the backward pass."""

    @abstractmethod
    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any], local: Collection[int]) -> list[Any]:
        """The gradients as all ranks of the process set have them; None stays None.

        ``local`` are ids of variables whose gradients stay this rank's. Collective: every rank has gradients for the
        same variables. Raises HorovodInternalError on every rank where ranks disagree.
        """

    def reduce_later(self, gradients: Sequence[Any], variables: Sequence[Any], update: Update) -> bool:
        """The same in the background: each variable is updated before its next use.

        Called between ``begin_backward`` and ``end_backward`` only, with all that was computed and no local variables.
        Returns whether that can be; if not, nothing was done.
        """
        return False

    def complete(self) -> None:
        """Make the updates that are left."""

    def begin_backward(self, local: Collection[Any]) -> None:
        """All that this backward pass computes comes to ``reduce`` as it is; ``local``: the local variables."""

    def end_backward(self) -> None:
        """Its step is over, also if it failed."""


@dataclass(frozen=True)
class Backend:
    """An adapter, as Keras uses it.

    ``broadcast_variables`` raises ValueError for variables without values yet, HorovodInternalError on every rank where
    ranks disagree.
    """

    tensor: Callable[[Any], Any]  # of anything that the framework can make one of
    gradients: Callable[[GradientSettings], Gradients]  # of an optimizer with these settings
    broadcast_variables: Callable[[Sequence[Any], int], None]  # writes a root's values into Keras variables
    as_written: Callable[[Any], Any]  # the same function, which the framework does not translate
    after: After
