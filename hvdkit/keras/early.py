"""On PyTorch: gradients travel during the backward pass of Keras's own ``train_step``.

Keras lets a loop of one's own call ``backward()`` as often as it likes, reach other models' parameters with it, and
change gradients before it applies them; so there they are reduced by ``apply``. In ``TorchTrainer.train_step`` nothing
of the user's runs from ``optimizer.scale_loss()`` to ``optimizer.apply()`` but the backward pass itself.
"""

from __future__ import annotations

from typing import Any

from hvdkit.keras.step import DistributedStep, distributed_step, is_distributed


def train_step_with_early_gradients(train_step: Any) -> Any:
    """Keras's ``TorchTrainer.train_step``, in which the optimizer may take gradients as they become complete."""
    import torch

    def train_step_with(self: Any, data: Any) -> Any:
        step = None if torch.compiler.is_compiling() else _step_of(getattr(self, "optimizer", None))
        if step is None:
            return train_step(self, data)
        with step.in_train_step():
            return train_step(self, data)

    return train_step_with


def scale_loss_and_begin(scale_loss: Any) -> Any:
    """An optimizer's ``scale_loss``, which a step calls just before its backward pass."""

    def scale_loss_with(self: Any, loss: Any) -> Any:
        step = _step_of(self)
        if step is not None:
            step.begin_backward()
        return scale_loss(self, loss)

    return scale_loss_with


def _step_of(optimizer: Any) -> DistributedStep | None:
    """What reduces the gradients of an optimizer as they come from backward(): no class of the user's is around it."""
    from keras.src.optimizers.loss_scale_optimizer import LossScaleOptimizer

    return distributed_step(optimizer) if is_distributed(optimizer) or type(optimizer) is LossScaleOptimizer else None
