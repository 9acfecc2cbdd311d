"""Warnings from optimizers of PyTorch whose gradients nobody reduces, after their steps.

An optimizer is checked until its gradients are known to be reduced. A program that reduces gradients by operations may
join and copy them, so the check counts how many elements were reduced since the optimizer's step before.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._compile import _disable_dynamo
from torch.optim import optimizer as torch_optimizer
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from hvdkit.api.gradients.guard import WATCH, is_settled, settle
from hvdkit.engine.session import runtime
from hvdkit.torch.gradients.hooks import in_flight
from hvdkit.torch.gradients.names import parameters_of
from hvdkit.torch.ops.framework import OPERATIONS

ALONE = (
    "The optimizer {kind} updated {what} with gradients of rank {rank} alone: the {size} ranks train different "
    "models.\n"
    "HINT: wrap it, optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters()), and "
    "call step() of what that returns. A loop of your own may reduce gradients by hvd.allreduce, or the model may be "
    "in a DistributedDataParallel. Where ranks train apart on purpose, or another library reduces gradients, say so: "
    "hvd.unsynchronized(optimizer)."
)
BYPASSED = (
    "The optimizer {kind} updated {what} on rank {rank} while a DistributedOptimizer was still reducing their "
    "gradients: the {size} ranks train different models.\n"
    "HINT: call step() of what hvd.DistributedOptimizer() returned, optimizer = hvd.DistributedOptimizer(optimizer, "
    "...), not that of the optimizer which was given to it; or call synchronize() of that one before."
)

# Steps in which enough was reduced: what a program reduces before the first step may be something else.
_SETTLING_STEPS = 2

_HANDLES: list[RemovableHandle] = []  # of the hook, once it is there


class _Reductions:
    """Counts of the elements that the program had reduced at the last step of each optimizer.

    For an optimizer's first step, the elements count that were reduced between the last steps of others: several
    optimizers may step one after another on gradients that were reduced together.
    """

    def __init__(self) -> None:
        self._latest = self._before = 0  # at the last step of any, and at the last one before something was reduced
        self._by_optimizer: Any = WeakIdKeyDictionary()  # elements, and steps in which they were enough

    def stepped(self, now: int) -> None:
        if now != self._latest:
            self._before, self._latest = self._latest, now

    def suffice(self, optimizer: torch.optim.Optimizer, now: int, elements: int) -> bool:
        """True if at least half as many elements as the gradients have were reduced since the last step."""
        before, steps = self._by_optimizer.get(optimizer, (self._before, 0))
        if 2 * (now - before) < elements:
            return False
        self._by_optimizer[optimizer] = now, steps + 1
        if steps + 1 >= _SETTLING_STEPS:
            settle(optimizer)
        return True


_REDUCTIONS = _Reductions()


def install() -> None:
    """Have PyTorch's optimizers warn where nobody reduces their gradients. Once a process."""
    if not _HANDLES:
        _HANDLES.append(torch_optimizer.register_optimizer_step_post_hook(_after_step))


@_disable_dynamo  # PyTorch has a graph end at each step anyway
def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    now = OPERATIONS.reduced_elements
    _REDUCTIONS.stepped(now)
    if hasattr(optimizer, "_synchronizer") or WATCH.inside or is_settled(optimizer):
        return
    parameters = [parameter for parameter in parameters_of(optimizer.param_groups) if parameter.grad is not None]
    is_in_flight = in_flight(parameters[0]) if parameters else False
    if is_in_flight is False:
        return  # nothing was computed, or a DistributedOptimizer that is made of this one has reduced it
    if is_in_flight:
        _warn(optimizer, BYPASSED, parameters)
    elif dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return  # DDP, FSDP, another library or the program may reduce them by torch.distributed
    elif not _REDUCTIONS.suffice(optimizer, now, sum(parameter.numel() for parameter in parameters)):
        _warn(optimizer, ALONE, parameters)


def _warn(optimizer: torch.optim.Optimizer, text: str, parameters: Sequence[torch.Tensor]) -> None:
    settle(optimizer)
    topology = runtime.topology()
    names = {
        id(parameter): f"'{name}', "
        for group in optimizer.param_groups
        for parameter, name in zip(group["params"], group.get("param_names", ()), strict=False)
    }
    first = f"{names.get(id(parameters[0]), '')}of shape {tuple(parameters[0].shape)}"
    what = f"{len(parameters)} parameter{'s' if len(parameters) > 1 else ''} (first: {first})"
    filled = text.format(kind=type(optimizer).__name__, what=what, rank=topology.rank, size=topology.size)
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("hvdkit", "torch"):
        level, frame = level + 1, frame.f_back
    warnings.warn(filled, stacklevel=level)  # at the line of the user's program
