"""Records of reduced gradients, by which an optimizer that was not wrapped decides whether to warn."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from hvdkit.engine.session import runtime

Optimizer = TypeVar("Optimizer")

_MARK = "_hvdkit_reduced"
_SETTLED = "_hvdkit_settled"


def unsynchronized(optimizer: Optimizer) -> Optimizer:
    """Say that an optimizer steps on the gradients of its rank alone on purpose, so that it does not warn.

    For models that each rank trains for itself, as in a search for hyperparameters or an ensemble. Nothing but the
    warning changes.

    Args:
        optimizer: one of PyTorch or Keras.

    Returns:
        The optimizer itself.

    Raises:
        TypeError: ``optimizer`` is no optimizer.

    Examples:
        >>> hvd.unsynchronized(optimizer) is optimizer
        True
    """
    if not _is_optimizer(optimizer):
        raise TypeError(f"unsynchronized: optimizer must be one of PyTorch or Keras, got {optimizer!r}")
    for each in [optimizer, *filter(_is_optimizer, vars(optimizer).values())]:  # of which it may be made
        settle(each)
    return optimizer


def _is_optimizer(value: Any) -> bool:
    return not isinstance(value, type) and (hasattr(value, "param_groups") or hasattr(value, "apply_gradients"))


def settle(optimizer: Any) -> None:
    """Never warn about this optimizer again: its gradients are reduced, or are not on purpose, or it has warned."""
    vars(optimizer)[_SETTLED] = True


def is_settled(optimizer: Any) -> bool:
    """True if an optimizer need not be checked; so it is in a job of one rank and in a forked child, too."""
    if vars(optimizer).get(_SETTLED) or not runtime.is_initialized() or runtime.is_forked():
        return True
    return bool(runtime.topology().size == 1)


class GradientWatch:
    """The threads that are in an optimizer's step on gradients that were reduced, or are about to be."""

    def __init__(self) -> None:
        self._thread = threading.local()

    @property
    def inside(self) -> bool:
        """True if this thread is in such a step."""
        return bool(getattr(self._thread, "depth", 0))

    @contextmanager
    def reduced(self) -> Iterator[None]:
        """Declare that optimizers get reduced gradients in this context."""
        self._thread.depth = getattr(self._thread, "depth", 0) + 1
        try:
            yield
        finally:
            self._thread.depth -= 1


WATCH = GradientWatch()


def mark(values: Iterable[Any]) -> None:
    """Remember that the user's program has reduced these tensors, or the gradients of these variables."""
    for value in values:
        for each in _both(value):
            setattr(each, _MARK, True)


def is_marked(value: Any) -> bool:
    """True if the user's program has reduced this very tensor, or the gradients of this variable."""
    return any(getattr(each, _MARK, False) is True for each in _both(value))


def _both(value: Any) -> list[Any]:
    """Return a tensor or variable, and the framework's variable under a variable of Keras."""
    under = getattr(value, "_value", None)
    return [value] if under is None or callable(under) else [value, under]
