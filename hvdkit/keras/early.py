"""On PyTorch: gradients travel during the backward pass of Keras's own ``train_step``.

Keras lets a loop, or a ``train_step`` of one's own, call ``backward()`` as often as it likes, reach other models'
parameters with it, and change gradients before it applies them; so there they are reduced by ``apply``. In
``TorchTrainer.train_step`` only the backward pass comes between ``optimizer.scale_loss()`` and ``optimizer.apply()``.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

from hvdkit.keras.step import DistributedStep, distributed_step

# Where Keras's own step calls scale_loss() from.
_own_code: Any = None


def train_step_with_early_gradients(train_step: Any) -> Any:
    """Keras's ``TorchTrainer.train_step``, in which the optimizer may take gradients as they become complete."""
    import torch
    from keras.src.backend.torch import trainer

    global _own_code
    original = inspect.unwrap(train_step)
    if getattr(original, "__module__", None) == trainer.__name__:  # or somebody else's stands there
        _own_code = getattr(original, "__code__", None)

    def train_step_with(self: Any, data: Any) -> Any:
        step = None if torch.compiler.is_compiling() else _step_of(getattr(self, "optimizer", None))
        if step is None:
            return train_step(self, data)
        with step.in_train_step():
            return train_step(self, data)

    return train_step_with


def fit_to_the_end(fit: Any) -> Any:
    """Keras's ``fit``, at whose end no update of a distributed optimizer is left, which would keep the model."""

    def fit_with(self: Any, *args: Any, **options: Any) -> Any:
        history = fit(self, *args, **options)
        step = distributed_step(getattr(self, "optimizer", None))
        if step is not None:
            step.complete()
        return history

    return fit_with


def scale_loss_and_begin(of_class: Any) -> Any:
    """``scale_loss`` of an optimizer that is distributed, or has a distributed one inside: a LossScaleOptimizer."""

    def scale_loss(self: Any, loss: Any) -> Any:
        """The loss, scaled as by its class."""
        scaled = of_class(self, loss)
        # Keras's own step calls it just before its backward pass.
        step = _step_of(self) if sys._getframe(1).f_code is _own_code else None
        if step is not None and step.may_begin:
            step.begin_backward()
        return scaled

    return scale_loss


def _step_of(optimizer: Any) -> DistributedStep | None:
    """What reduces the gradients of an optimizer as they come from backward(), if nothing of the user's comes first."""
    is_ours = getattr(getattr(type(optimizer), "apply", None), "reduces_first", False)
    return distributed_step(optimizer) if is_ours and "apply" not in vars(optimizer) else None
