"""Replacements in Keras's own classes, above all the warning from optimizers whose gradients nobody reduces."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import keras

from hvdkit.api.gradients.guard import WATCH, is_marked, is_settled, settle
from hvdkit.engine.session import runtime
from hvdkit.keras import keras_2
from hvdkit.keras.optimizer_class import reducing_first, reducing_pairs_first
from hvdkit.keras.step import distributed_step, is_distributed, scale_loss_and_begin, train_step_with_backward

NOT_WRAPPED = (
    "The optimizer '{name}' ({kind}) updates variables with gradients of rank {rank} alone: the {size} ranks train "
    "different models.\n"
    "HINT: wrap it, optimizer = hvd.DistributedOptimizer(optimizer), also after a model was loaded "
    "(or use hvd.load_model). A loop of your own reduces gradients by hvdkit.tensorflow.DistributedGradientTape, or by "
    "hvd.allreduce, whose results it must not change. If it changes them, or if ranks train apart on purpose, call "
    "hvd.unsynchronized(optimizer)."
)


def install() -> None:
    """Have Keras's optimizers warn where nobody reduces their gradients, and know those inside of a loss scale.

    And on PyTorch, have Keras's own ``train_step`` say when gradients may travel.
    """
    if kinds := keras_2.optimizer_classes():
        from tf_keras.src.mixed_precision import loss_scale_optimizer as of_keras_2

        for kind in kinds:
            _replace(kind, "apply_gradients", _warning_of_pairs)
        for kind in (of_keras_2.LossScaleOptimizer, of_keras_2.LossScaleOptimizerV3):
            _replace(kind, "apply_gradients", reducing_pairs_first)
    from keras.src.optimizers import base_optimizer, loss_scale_optimizer
    from keras.src.trainers import trainer

    if keras.backend.backend() == "torch":
        from keras.src.backend.torch.trainer import TorchTrainer

        _replace(TorchTrainer, "train_step", train_step_with_backward)
        _replace(loss_scale_optimizer.LossScaleOptimizer, "scale_loss", scale_loss_and_begin)
    _replace(base_optimizer.BaseOptimizer, "apply", _warning)
    _replace(loss_scale_optimizer.LossScaleOptimizer, "apply", reducing_first)
    for holder in (trainer.Trainer, trainer):
        _replace(holder, "_resolve_auto_jit_compile", _without_jit)
        _replace(holder, "resolve_auto_jit_compile", _without_jit)


def _replace(holder: Any, name: str, make: Any) -> None:
    original = vars(holder).get(name)
    if original is not None and not getattr(original, "asks_hvdkit", False):
        replacement = functools.wraps(original)(make(original))
        replacement.asks_hvdkit = True  # type: ignore[attr-defined]
        setattr(holder, name, replacement)


def _warning(apply: Any) -> Any:
    def warn_and_apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        _warn_if_alone(self, grads, trainable_variables)
        return apply(self, grads, trainable_variables)

    return warn_and_apply


def _warning_of_pairs(apply: Any) -> Any:
    """Return what ``_warning`` does for Keras 2."""

    def warn_and_apply(self: Any, grads_and_vars: Any, *args: Any, **options: Any) -> Any:
        pairs = list(grads_and_vars)
        _warn_if_alone(self, [grad for grad, _ in pairs], [variable for _, variable in pairs])
        return apply(self, pairs, *args, **options)

    return warn_and_apply


def _warn_if_alone(optimizer: Any, grads: Any, variables: Any) -> None:
    """Warn once for each optimizer, if there are other ranks and the user's program does not reduce its gradients."""
    grads = grads if isinstance(grads, list | tuple) else []
    trained = variables if isinstance(variables, list | tuple) else getattr(optimizer, "_trainable_variables", ())
    if WATCH.inside or is_distributed(optimizer) or any(map(is_marked, [*grads, *trained])) or is_settled(optimizer):
        return
    settle(optimizer)
    topology = runtime.topology()
    name, kind = keras_2.name_of(optimizer), type(optimizer).__name__
    text = NOT_WRAPPED.format(name=name, kind=kind, rank=topology.rank, size=topology.size)
    warnings.warn(text, stacklevel=4)


def _without_jit(resolve: Any) -> Any:
    """Have jit_compile="auto" mean no where hvd's operations are in the step, which XLA cannot compile."""

    def resolve_without_jit(model: Any) -> bool:
        is_ours = distributed_step(getattr(model, "optimizer", None)) is not None
        if is_ours and keras.backend.backend() == "tensorflow":
            return False
        return bool(resolve(model))

    return resolve_without_jit
