"""An optimizer's step on reduced gradients, also with a closure or after synchronize()."""

from __future__ import annotations

import numbers
import warnings
from collections.abc import Callable
from typing import Any

import torch

from hvdkit.engine.session import runtime
from hvdkit.kernels.reduce_op import ReduceOp
from hvdkit.torch.gradients.synchronizer import GradientSynchronizer
from hvdkit.torch.ops.allreduce import allreduce_async_
from hvdkit.torch.ops.sync import synchronize

STEP_AFTER_SYNCHRONIZE = (
    "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(). This can "
    "cause training slowdown. You may want to consider using optimizer.skip_synchronize() context if you use "
    "optimizer.synchronize() in your code.\n"
    "HINT: with optimizer.skip_synchronize(): optimizer.step()"
)
SKIPPED_IN_FLIGHT = (
    "optimizer.step() called inside optimizer.skip_synchronize() context after loss.backward() but before "
    "optimizer.synchronize(). The gradients are those of this rank alone, and the ranks would diverge.\n"
    "HINT: call optimizer.synchronize() before optimizer.skip_synchronize(), or call optimizer.step() outside of it."
)
COMPUTED_IN_STEP = (
    "The wrapped optimizer computed gradients inside its own step(). They are those of this rank alone and were not "
    "reduced, so the ranks have diverged.\n"
    "HINT: pass the computation to it as a closure, optimizer.step(closure): gradients are reduced after each call of "
    "the closure."
)


def scalar_of(loss: Any) -> float | torch.Tensor | None:
    """Return the loss if it is one real number, as a Python number or a tensor of one element; else None."""
    if isinstance(loss, torch.Tensor):
        return None if loss.numel() != 1 or loss.is_complex() or loss.dtype is torch.bool else loss
    return float(loss) if isinstance(loss, numbers.Real) and not isinstance(loss, bool) else None


def reduce_and_step(
    gradients: GradientSynchronizer, plain_step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Reduce the gradients and call the wrapped optimizer's ``plain_step``. A closure reduces them after each call."""
    takes_closure = True
    if args and callable(args[0]):
        _synchronize_before_closure(gradients)
        args = (_synchronized_closure(gradients, args[0]), *args[1:])
    elif callable(kwargs.get("closure")):
        _synchronize_before_closure(gradients)
        kwargs = {**kwargs, "closure": _synchronized_closure(gradients, kwargs["closure"])}
    elif gradients.should_synchronize and not (gradients.for_scaler and gradients.is_synchronized):
        takes_closure = False
        if gradients.is_synchronized:
            warnings.warn(STEP_AFTER_SYNCHRONIZE, stacklevel=3)
        gradients.synchronize(updates=True)
    else:
        _check_synchronized(gradients)
    gradients.forget_synchronized()
    try:
        result = plain_step(*args, **kwargs)
    except BaseException:  # other ranks compare their parameters then
        gradients.verification.updated(gradients.groups(), gradients.name_of)
        raise
    if gradients.in_flight:
        raise AssertionError(COMPUTED_IN_STEP)
    gradients.verification.updated(gradients.groups(), gradients.name_of)
    if takes_closure:
        gradients.forget_synchronized()
    return result


def _synchronize_before_closure(gradients: GradientSynchronizer) -> None:
    """Reduce gradients that were computed before ``step(closure)``: optimizers such as SAM use them first.

    Collective: all ranks learn if any rank has such gradients, since then every rank must take part.
    """
    if not gradients.should_synchronize or not gradients.settings.process_set.included():
        return
    is_distributed = gradients.bind()
    has_gradients = torch.tensor([gradients.in_flight], dtype=torch.uint8)
    if is_distributed:
        has_gradients = _allreduced(gradients, has_gradients, "before_closure", ReduceOp.MAX)
    if has_gradients.item():
        gradients.synchronize()


def _check_synchronized(gradients: GradientSynchronizer) -> None:
    if gradients.in_flight:
        raise AssertionError(SKIPPED_IN_FLIGHT)
    gradients.check_cleared()


def _synchronized_closure(gradients: GradientSynchronizer, closure: Callable[[], Any]) -> Callable[[], Any]:
    """Return a closure that also reduces the gradients, and the loss, so that all ranks decide alike."""
    should_synchronize = gradients.should_synchronize

    def closure_and_synchronize() -> Any:
        loss = closure()
        if not should_synchronize:
            _check_synchronized(gradients)
            return loss
        gradients.synchronize()
        return _reduce_loss(gradients, loss)

    return closure_and_synchronize


def _reduce_loss(gradients: GradientSynchronizer, loss: Any) -> Any:
    """Return the average (with ``op=Sum`` the sum) of the ranks' losses, computed in float64.

    A loss that is no real number is returned as it is. Such a rank takes part with zero, so that no rank waits.
    """
    scalar = scalar_of(loss)
    if not gradients.bind():
        return loss
    value = torch.as_tensor(0.0 if scalar is None else scalar, dtype=torch.float64).detach().reshape(1).clone()
    op = ReduceOp.SUM if gradients.settings.op is ReduceOp.SUM else ReduceOp.AVERAGE
    value = _allreduced(gradients, value, "loss", op)
    if scalar is None:
        return loss
    if not isinstance(loss, torch.Tensor):
        return value.item()
    return value.reshape(loss.shape).to(loss if loss.is_floating_point() else loss.device)


def _allreduced(gradients: GradientSynchronizer, tensor: torch.Tensor, what: str, op: ReduceOp) -> torch.Tensor:
    name = f"{what}.{gradients.settings.label(runtime.engine())}"
    handle = allreduce_async_(tensor, name=name, op=op, process_set=gradients.settings.process_set)
    reduced: torch.Tensor = synchronize(handle)
    return reduced
