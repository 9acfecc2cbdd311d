"""Records of reduced gradients, by which an optimizer that was not wrapped decides whether to warn."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from hvdkit.engine.session import runtime

Optimizer = TypeVar("Optimizer")


def unsynchronized(optimizer: Optimizer) -> Optimizer:
    """Say that an optimizer steps on the gradients of its rank alone on purpose, so that it does not warn.

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
        raise TypeError(f"unsynchronized: optimizer must be an optimizer of PyTorch or Keras, got {optimizer!r}")
    for each in [optimizer, *filter(_is_optimizer, vars(optimizer).values())]:  # of which it may be made
        settle(each)
    return optimizer


def _is_optimizer(value: Any) -> bool:
    return not isinstance(value, type) and (hasattr(value, "param_groups") or hasattr(value, "apply_gradients"))


def settle(optimizer: Any) -> None:
    """Never warn about this optimizer again: its gradients are reduced, or are not on purpose, or it has warned."""
    vars(optimizer)["_hvdkit_settled"] = True


def is_settled(optimizer: Any) -> bool:
    """True if an optimizer need not be checked; so it is in a job of one rank and in a forked child, too."""
    is_alone = not runtime.is_initialized() or runtime.is_forked() or runtime.topology().size == 1
    return bool(is_alone or vars(optimizer).get("_hvdkit_settled"))


class GradientWatch(threading.local):
    """The threads that are in an optimizer's step on gradients that were reduced, or are about to be."""

    inside = 0  # steps, one in the other, in which this thread is

    @contextmanager
    def reduced(self) -> Iterator[None]:
        """Declare that optimizers get reduced gradients in this context."""
        self.inside += 1
        try:
            yield
        finally:
            self.inside -= 1


WATCH = GradientWatch()


def mark(values: Iterable[Any]) -> None:
    """Remember that the user's program has reduced these tensors, or the gradients of these variables."""
    for value in values:
        value._hvdkit_reduced = framework_variable(value)._hvdkit_reduced = True


def is_marked(value: Any) -> bool:
    """True if the user's program has reduced this very tensor, or the gradients of this variable."""
    return any(getattr(each, "_hvdkit_reduced", False) is True for each in (value, framework_variable(value)))


def framework_variable(value: Any) -> Any:
    """Return the framework's variable under a variable of Keras, else the tensor or variable itself."""
    under = getattr(value, "_value", None)
    return value if under is None or callable(under) else under
