"""Steps of distributed optimizers: on reduced gradients, also with a closure or a GradScaler, and with Adasum."""

from __future__ import annotations

import functools
import logging
import numbers
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch._compile import _disable_dynamo

from hvdkit.api.gradients.guard import WATCH
from hvdkit.engine.session import runtime
from hvdkit.errors import ParametersDifferError, PeerFailedError, PeerLostError
from hvdkit.kernels.reduce_op import ReduceOp
from hvdkit.torch.gradients.hooks import synchronizers_in_flight
from hvdkit.torch.gradients.synchronizer import GradientSynchronizer
from hvdkit.torch.ops.allreduce import allreduce_async_
from hvdkit.torch.ops.sync import synchronize

logger = logging.getLogger("hvdkit")

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


def reduce_and_step(
    gradients: GradientSynchronizer, plain_step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Reduce the gradients and call the wrapped optimizer's ``plain_step``. A closure reduces them after each call."""
    if args and callable(args[0]):
        _synchronize_before_closure(gradients)
        args = (_synchronized_closure(gradients, args[0]), *args[1:])
    elif callable(kwargs.get("closure")):
        _synchronize_before_closure(gradients)
        kwargs = {**kwargs, "closure": _synchronized_closure(gradients, kwargs["closure"])}
    elif gradients.should_synchronize and gradients.awaits_reduction:
        if gradients.is_synchronized:
            warnings.warn(STEP_AFTER_SYNCHRONIZE, stacklevel=3)
        gradients.synchronize(updates=True)
    else:
        _check_synchronized(gradients)
    has_computed = False
    try:
        result = plain_step(*args, **kwargs)
        has_computed = gradients.hooks.touched
    finally:  # also after an error, since other ranks compare their parameters then
        gradients.forget_synchronized()
        try:
            gradients.verification.updated(gradients.groups(), gradients.name_of)
        except ParametersDifferError:
            if not has_computed:  # the next error tells the cause
                raise
        except (PeerLostError, PeerFailedError) as error:
            # This step is complete, so the next one raises the error.
            logger.warning("the parameters were not compared after a step: %s", error)
    if has_computed:
        raise AssertionError(COMPUTED_IN_STEP)
    return result


def _synchronize_before_closure(gradients: GradientSynchronizer) -> None:
    """Reduce gradients that any rank computed before ``step(closure)``, which optimizers such as SAM use first."""
    if not gradients.should_synchronize or not gradients.settings.process_set.included():
        return
    is_distributed = gradients.bind()
    has_gradients = torch.tensor([gradients.hooks.touched], dtype=torch.uint8)
    if is_distributed:
        has_gradients = _allreduced(gradients, has_gradients, "before_closure", ReduceOp.MAX)
    if has_gradients.item():
        gradients.synchronize()


def _check_synchronized(gradients: GradientSynchronizer) -> None:
    runtime.check_not_forked()
    if gradients.hooks.touched:
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
        if gradients.awaits_reduction:
            gradients.synchronize()
        return reduce_loss(gradients, loss)

    return closure_and_synchronize


def reduce_loss(gradients: GradientSynchronizer, loss: Any) -> Any:
    """Return the average (with ``op=Sum`` the sum) of the ranks' losses, computed in float64.

    A loss that is no real number is returned as it is. Such a rank takes part with zero, so that no rank waits.
    """
    if not gradients.bind():
        return loss
    number: Any = None
    if isinstance(loss, torch.Tensor):
        number = None if loss.numel() != 1 or loss.is_complex() or loss.dtype is torch.bool else loss
    elif isinstance(loss, numbers.Real) and not isinstance(loss, bool):
        number = float(loss)
    value = torch.as_tensor(0.0 if number is None else number, dtype=torch.float64).detach().reshape(1).clone()
    op = ReduceOp.SUM if gradients.settings.op is ReduceOp.SUM else ReduceOp.AVERAGE
    value = _allreduced(gradients, value, "loss", op)
    if number is None:
        return loss
    if not isinstance(loss, torch.Tensor):
        return value.item()
    return value.reshape(loss.shape).to(loss if loss.is_floating_point() else loss.device)


def _allreduced(gradients: GradientSynchronizer, tensor: torch.Tensor, what: str, op: ReduceOp) -> torch.Tensor:
    name = f"{what}.{gradients.settings.label(runtime.engine())}"
    handle = allreduce_async_(tensor, name=name, op=op, process_set=gradients.settings.process_set)
    reduced: torch.Tensor = synchronize(handle)
    return reduced


@functools.cache
def guard_scalers() -> None:
    """Have GradScaler's ``step`` and ``unscale_`` synchronise gradients of distributed optimizers. Once a process."""
    scaler: Any = torch.amp.GradScaler
    plain_step, plain_unscale = scaler.step, scaler.unscale_

    @functools.wraps(plain_step)
    def step(self: torch.amp.GradScaler, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        gradients = _read_by(self, optimizer)
        if gradients is not None and "closure" not in kwargs:
            gradients.synchronize_for_reading()
        return plain_step(self, optimizer, *args, **kwargs)

    @functools.wraps(plain_unscale)
    def unscale_(self: torch.amp.GradScaler, optimizer: Any) -> None:
        gradients = _read_by(self, optimizer)
        if gradients is not None and gradients.hooks.touched:
            gradients.synchronize_for_reading()
        plain_unscale(self, optimizer)

    scaler.step, scaler.unscale_ = step, unscale_


@functools.cache
def guard_clipping() -> None:
    """Have ``torch.nn.utils.clip_grad_norm_`` and ``clip_grad_value_`` synchronise gradients in flight. Once a process.

    So the norm is that of the reduced gradient, also in libraries that clip between backward() and step().
    """
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        clip = _synchronizing_first(getattr(torch.nn.utils, name))
        setattr(torch.nn.utils, name, clip)
        setattr(torch.nn.utils.clip_grad, name, clip)


def _synchronizing_first(clip: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(clip)
    def synchronize_and_clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return clip(parameters, *args, **kwargs)
        members = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        for gradients in synchronizers_in_flight(members):
            gradients.synchronize_for_reading()
        return clip(members, *args, **kwargs)

    return synchronize_and_clip


def _read_by(scaler: torch.amp.GradScaler, optimizer: Any) -> GradientSynchronizer | None:
    """Return the synchronizer of gradients that a scaler reads; None where they stay their rank's, as with Adasum."""
    gradients: GradientSynchronizer | None = getattr(optimizer, "_synchronizer", None)
    return gradients if scaler.is_enabled() and not isinstance(gradients, AdasumSynchronizer) else None


class AdasumSynchronizer(GradientSynchronizer):
    """The combination of the ranks' updates by Adasum; gradients stay their rank's.

    S. Maleki et al., "Scaling Distributed Training with Adaptive Summation", MLSys 2021. As in Horovod, each rank lets
    the wrapped optimizer make its step, and the differences that it made are what Adasum combines.
    """

    def _complete(self, parameter: torch.Tensor) -> None:
        pass

    def synchronize(self, updates: bool = False) -> None:
        """Do nothing: gradients stay as each rank computed them."""

    @_disable_dynamo
    def step(self, plain_step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Let the wrapped optimizer step on this rank's gradients, then combine all ranks' steps. Collective."""
        is_distributed = self.bind()
        parameters = self.trainable()
        self.hooks.attach_all(parameters)
        starts = [parameter.detach().clone() for parameter in parameters.values()]
        with WATCH.reduced():  # the optimizer may consist of others; its whole update is combined
            result = plain_step(*args, **kwargs)
        with torch.no_grad():
            for wait in [self._combine(p, start) for p, start in zip(parameters.values(), starts, strict=True)]:
                wait()
        self.hooks.reset()
        if is_distributed:
            self.verification.combined(self._engine, self.settings.label(self._engine), self.groups(), self.name_of)
        return result

    def _combine(self, parameter: torch.Tensor, start: torch.Tensor) -> Callable[[], None]:
        compression = self.settings.compressor
        delta, context = compression.compress(parameter.detach() - start)
        name = f"adasum.{self.settings.label(self._engine)}.{self.name_of(parameter)}"
        handle = allreduce_async_(delta.contiguous(), name=name, op=ReduceOp.ADASUM)

        def wait() -> None:
            delta = compression.decompress(synchronize(handle), context)
            parameter.copy_(start + delta.to(dtype=start.dtype, device=start.device))

        return wait
