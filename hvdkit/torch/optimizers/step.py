"""An optimizer's step: whether its gradients are reduced before, after a closure, or by the user."""

from __future__ import annotations

import numbers
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch._compile import _disable_dynamo

from hvdkit.kernels.reduce_op import ReduceOp
from hvdkit.torch.gradients.settings import Settings
from hvdkit.torch.gradients.synchronizer import GradientSynchronizer
from hvdkit.torch.ops.allreduce import allreduce_async_
from hvdkit.torch.ops.sync import synchronize
from hvdkit.torch.optimizers.overlap import Updates, has_step_hooks

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


class OptimizerSynchronizer(GradientSynchronizer):
    """Reduces the gradients for ``optimizer.step()``, unless the user or a GradScaler had it done before."""

    def __init__(self, optimizer: torch.optim.Optimizer, settings: Settings) -> None:
        self.should_synchronize = True
        self._is_synchronized = False
        self._for_scaler = False
        self._updates: Updates | None = None  # of the last step, while some are still to be made
        super().__init__(optimizer, settings)

    @property
    def is_synchronized(self) -> bool:
        """True when gradients were synchronised, and neither stepped with nor computed anew since."""
        return self._is_synchronized and not self.hooks.touched

    @_disable_dynamo
    def synchronize(self, updates: bool = False) -> None:
        """See GradientSynchronizer."""
        self.complete()
        super().synchronize(updates)
        self._is_synchronized = True
        self._for_scaler = False

    def synchronize_for_scaler(self) -> None:
        """A GradScaler is about to read the gradients for step(), which need not synchronise again."""
        if self.should_synchronize and not self.is_synchronized:
            self.synchronize()
            self._for_scaler = True

    def complete(self) -> None:
        """Make what is left of the last step's updates."""
        updates = self._updates
        if updates is not None:
            updates.complete_all()
            if updates.is_over:
                self._updates = None

    def _complete(self, parameter: torch.Tensor) -> None:
        if self._updates is not None:
            self.complete()
        super()._complete(parameter)

    @property
    def updates(self) -> Updates | None:
        """Those of the last step that are still to be made."""
        return None if self._updates is None or self._updates.is_over else self._updates

    @_disable_dynamo
    def _leave_to_background(self) -> bool:
        """Begin a step whose updates are made when they are needed. Returns whether that can be."""
        optimizer = self._optimizer()
        if optimizer is None or not self.settings.overlap_forward or has_step_hooks(optimizer):
            return False
        begun = self.begin_step()
        if begun is not None:
            self.forget_synchronized()
            self._updates = Updates(self, *begun, optimizer)
            self._updates.begin()
        return begun is not None

    def step(self, base_step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Synchronise and then call the wrapped optimizer's ``step``, whose closure, if any, synchronises itself."""
        self.complete()
        if args and callable(args[0]):
            self._synchronize_before_closure()
            args = (self._synchronized_closure(args[0]), *args[1:])
        elif callable(kwargs.get("closure")):
            self._synchronize_before_closure()
            kwargs = {**kwargs, "closure": self._synchronized_closure(kwargs["closure"])}
        elif self.should_synchronize and not (self._for_scaler and self.is_synchronized):
            if self.is_synchronized:
                warnings.warn(STEP_AFTER_SYNCHRONIZE, stacklevel=3)
            elif self._leave_to_background():
                return None
            self.synchronize(updates=True)
        else:
            self._check_synchronized()
        self.forget_synchronized()
        try:
            result = base_step(*args, **kwargs)
        except BaseException:  # the others compare what they have then
            self.verification.updated(self._groups(), self.name_of)
            raise
        if self.in_flight:
            raise AssertionError(COMPUTED_IN_STEP)
        self.verification.updated(self._groups(), self.name_of)
        self.forget_synchronized()
        return result

    def _synchronize_before_closure(self) -> None:
        """Reduce gradients that were computed before ``step(closure)``: optimizers such as SAM use them first.

        Collective: all ranks learn whether some rank has any, since every rank must then take part.
        """
        if not self.should_synchronize or not self.settings.process_set.included():
            return
        self._bind()
        has_gradients = torch.tensor([self.in_flight], dtype=torch.uint8)
        if self._distributed:
            has_gradients = self._allreduced(has_gradients, "before_closure", ReduceOp.MAX)
        if has_gradients.item():
            self.synchronize()

    def _check_synchronized(self) -> None:
        if self.in_flight:
            raise AssertionError(SKIPPED_IN_FLIGHT)
        self._check_cleared()

    def forget_synchronized(self) -> None:
        """The gradients that were synchronised have been used, or cleared."""
        self._is_synchronized = False
        self._for_scaler = False

    def abandon(self) -> None:
        """See GradientSynchronizer."""
        self.complete()
        self.forget_synchronized()
        self.should_synchronize = True
        super().abandon()

    def _synchronized_closure(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """A closure after which gradients are reduced, and the loss with them, so that all ranks decide alike."""
        should_synchronize = self.should_synchronize

        def closure_and_synchronize() -> Any:
            loss = closure()
            if not should_synchronize:
                self._check_synchronized()
                return loss
            self.synchronize()
            return self._reduce_loss(loss)

        return closure_and_synchronize

    def _reduce_loss(self, loss: Any) -> Any:
        """Return the average (with ``op=Sum`` the sum) of the ranks' losses, computed in float64.

        A loss that is no real number is returned as it is. Such a rank takes part with zero, so that no rank waits.
        """
        scalar = scalar_of(loss)
        if not self._distributed:
            return loss
        value = torch.as_tensor(0.0 if scalar is None else scalar, dtype=torch.float64).detach().reshape(1).clone()
        value = self._allreduced(value, "loss", ReduceOp.SUM if self.settings.op is ReduceOp.SUM else ReduceOp.AVERAGE)
        if scalar is None:
            return loss
        if not isinstance(loss, torch.Tensor):
            return value.item()
        return value.reshape(loss.shape).to(loss if loss.is_floating_point() else loss.device)

    def _allreduced(self, tensor: torch.Tensor, what: str, op: ReduceOp) -> torch.Tensor:
        name = f"{what}.{self.settings.label(self._engine)}"
        handle = allreduce_async_(tensor, name=name, op=op, process_set=self.settings.process_set)
        reduced: torch.Tensor = synchronize(handle)
        return reduced
