"""Adasum for optimizers: it combines the ranks' updates of the parameters, not their gradients.

S. Maleki et al., "Scaling Distributed Training with Adaptive Summation", MLSys 2021. As in Horovod, each rank lets the
wrapped optimizer make its step, and the differences that it made are what Adasum combines.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._compile import _disable_dynamo

from hvdkit.api.gradients.guard import WATCH
from hvdkit.kernels.reduce_op import ReduceOp
from hvdkit.torch.gradients.synchronizer import GradientSynchronizer
from hvdkit.torch.ops.allreduce import allreduce_async_
from hvdkit.torch.ops.sync import synchronize


class AdasumSynchronizer(GradientSynchronizer):
    """The combination of the ranks' steps; gradients stay their rank's."""

    def _complete(self, parameter: torch.Tensor) -> None:
        pass

    def synchronize(self, updates: bool = False) -> None:
        """Do nothing: gradients stay as each rank computed them."""

    def synchronize_for_scaler(self) -> None:
        """Do nothing: each rank unscales its own gradients."""

    @_disable_dynamo
    def step(self, plain_step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Let the wrapped optimizer step on this rank's gradients, then combine all ranks' steps. Collective."""
        is_distributed = self.bind()
        parameters = list(self.trainable().values())
        for parameter in parameters:
            self.hooks.attach(parameter)
        starts = [parameter.detach().clone() for parameter in parameters]
        with WATCH.reduced():  # the optimizer may consist of others; its whole update is combined
            result = plain_step(*args, **kwargs)
        with torch.no_grad():
            for wait in [self._combine(p, start) for p, start in zip(parameters, starts, strict=True)]:
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
