"""What Keras asks of the adapter of the framework under it. An adapter answers in its module ``for_keras``."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol, TypeVar

from hvdkit.api.gradient_settings import GradientSettings

Function = TypeVar("Function", bound=Callable[..., object])

# The adapters by the names that Keras gives their frameworks. Each has ``BACKEND``, a Backend, in ``for_keras``.
ADAPTERS = {"tensorflow": "hvdkit.tensorflow", "torch": "hvdkit.torch"}


class Gradients:
    """The gradients of one optimizer. What ``reduce`` alone needs is here; early ones travel before it."""

    is_early = False  # whether gradients may travel during the backward pass

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any], local: Collection[int]) -> list[Any]:
        """The gradients as all ranks of the process set have them; None stays None.

        ``local`` are ids of variables whose gradients stay this rank's. Collective: every rank has gradients for the
        same variables. Raises HorovodInternalError on every rank where ranks disagree.
        """
        raise NotImplementedError

    def begin_backward(self, local: Collection[Any]) -> None:
        """All that this backward pass computes comes to ``reduce`` as it is; ``local``: the local variables."""

    def end_backward(self) -> None:
        """Its step is over, also if it failed."""


class Backend(Protocol):
    """An adapter, as Keras uses it."""

    def tensor(self, value: Any) -> Any:
        """A tensor of anything that the framework can make one of."""

    def gradients(self, settings: GradientSettings) -> Gradients:
        """What reduces the gradients of an optimizer with these settings."""

    def broadcast_variables(self, variables: Sequence[Any], root_rank: int) -> None:
        """Write the values of ``root_rank`` into Keras variables on all ranks.

        Raises ValueError for variables without values yet, HorovodInternalError on every rank where ranks disagree.
        """

    def as_written(self, function: Function) -> Function:
        """``function``, which the framework runs as it is and does not translate."""


def adapter(name: str) -> Any:
    """The module with the operations on a framework's tensors. Raises KeyError for a framework that has none."""
    return importlib.import_module(ADAPTERS[name])


def backend(name: str) -> Backend:
    """How Keras uses it."""
    found: Backend = importlib.import_module(f"{ADAPTERS[name]}.for_keras").BACKEND
    return found
