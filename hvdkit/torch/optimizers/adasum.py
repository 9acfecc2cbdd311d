"""Adasum for optimizers: what is combined are the ranks' updates of the parameters, not their gradients.

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
from hvdkit.torch.ops.allreduce import allreduce_async_
from hvdkit.torch.ops.sync import synchronize
from hvdkit.torch.optimizers.step import OptimizerSynchronizer


class AdasumSynchronizer(OptimizerSynchronizer):
    """Leaves gradients to their rank and combines the ranks' steps."""

    def _complete(self, parameter: torch.Tensor) -> None:
        pass

    def synchronize(self, updates: bool = False) -> None:
        """Nothing: gradients stay as each rank computed them."""

    def synchronize_for_scaler(self) -> None:
        """Nothing: each rank unscales its own gradients."""

    @_disable_dynamo
    def step(self, base_step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Let the wrapped optimizer step on this rank's gradients, then combine all ranks' steps. Collective."""
        self._check_owner()
        self._bind()
        parameters = list(self._trainable().values())
        for parameter in parameters:
            self.hooks.attach(parameter)
        starts = [parameter.detach().clone() for parameter in parameters]
        with WATCH.reduced():  # it may be made of other optimizers; what is reduced is what it does
            result = base_step(*args, **kwargs)
        with torch.no_grad():
            for wait in [self._combine(p, start) for p, start in zip(parameters, starts, strict=True)]:
                wait()
        self.hooks.reset()
        if self._distributed:
            self.verification.combined(self._engine, self.settings.label(self._engine), self._groups(), self.name_of)
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
