"""Whether somebody reduces gradients: what an optimizer that was not wrapped asks before it warns."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from hvdkit.engine.session import runtime

Optimizer = TypeVar("Optimizer")

_MARK = "_hvdkit_reduced"
_SETTLED = "_hvdkit_settled"


def unsynchronized(optimizer: Optimizer) -> Optimizer:
    """Say that an optimizer steps on the gradients of its rank alone on purpose, so that no warning tells of it.

    For models that each rank trains for itself, as in a search for hyperparameters or an ensemble. Nothing but the
    warning changes.

    Args:
        optimizer: one of PyTorch or Keras.

    Returns:
        The optimizer itself.

    Raises:
        TypeError: for what is no optimizer.

    Examples:
        >>> hvd.unsynchronized(optimizer) is optimizer
        True
    """
    if not _is_optimizer(optimizer):
        raise TypeError(f"unsynchronized: optimizer must be one of PyTorch or Keras, got {optimizer!r}")
    settle(optimizer)
    for one in list(vars(optimizer).values()):  # of which it may be made
        if _is_optimizer(one):
            settle(one)
    return optimizer


def _is_optimizer(one: Any) -> bool:
    return not isinstance(one, type) and (hasattr(one, "param_groups") or hasattr(one, "apply_gradients"))


def settle(optimizer: Any) -> None:
    """Nothing is to be said of this optimizer any more: it was said, or it is on purpose, or as it should be."""
    vars(optimizer)[_SETTLED] = True


def is_settled(optimizer: Any) -> bool:
    """Whether there is nothing to say of an optimizer's step, as in a job of one rank and in a forked child."""
    if vars(optimizer).get(_SETTLED) or not runtime.is_initialized() or runtime.is_forked():
        return True
    return bool(runtime.topology().size == 1)


class GradientWatch:
    """Who reduces gradients in this process: the user, by a tape or an operation, or a wrapped optimizer."""

    def __init__(self) -> None:
        self._sources: WeakValueDictionary[int, Any] = WeakValueDictionary()  # by id
        self._thread = threading.local()

    def seen(self, sources: Iterable[Any]) -> None:
        """The user's program reduced the gradients of variables, and may give them to any optimizer."""
        for source in sources:
            for one in _both(source):
                self._sources[id(one)] = one

    def knows(self, variable: Any) -> bool:
        """Whether the user's program has reduced the gradients of a variable."""
        return any(self._sources.get(id(one)) is one for one in _both(variable))

    @property
    def inside(self) -> bool:
        """Whether this thread is in an optimizer's step on gradients that were reduced, or are about to be."""
        return bool(getattr(self._thread, "depth", 0))

    @contextmanager
    def reduced(self) -> Iterator[None]:
        """In this context optimizers are given reduced gradients."""
        self._thread.depth = getattr(self._thread, "depth", 0) + 1
        try:
            yield
        finally:
            self._thread.depth -= 1


def _both(variable: Any) -> list[Any]:
    """A variable, and the framework's own under one of Keras."""
    under = getattr(variable, "_value", None)
    return [variable] if under is None or callable(under) else [variable, under]


def mark(tensors: Iterable[Any]) -> None:
    """Remember that tensors are what an operation of the user's has reduced."""
    for tensor in tensors:
        setattr(tensor, _MARK, True)


def is_marked(tensor: Any) -> bool:
    """Whether the user's program has reduced this very tensor."""
    return getattr(tensor, _MARK, False) is True


WATCH = GradientWatch()
