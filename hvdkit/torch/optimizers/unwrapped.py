"""Warnings from optimizers of PyTorch whose gradients nobody reduces, after their steps.

An optimizer is checked from its second step on. A program that reduces gradients by operations may join and copy them,
so the check asks for at least half as many elements reduced since the step before as its gradients have.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._compile import _disable_dynamo
from torch.optim import optimizer as torch_optimizer

from hvdkit.api.gradients.guard import WATCH, is_settled, settle
from hvdkit.engine.session import runtime
from hvdkit.torch.gradients.hooks import in_flight
from hvdkit.torch.gradients.names import parameters_of
from hvdkit.torch.ops.framework import OPERATIONS

ALONE = (
    "The optimizer {kind} updated {what} with gradients of rank {rank} alone: the {size} ranks train different "
    "models.\n"
    "HINT: wrap it, optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters()), and "
    "call step() of the returned optimizer. A loop of your own may reduce gradients by hvd.allreduce, or the model may "
    "be in a DistributedDataParallel. If ranks train apart on purpose, or another library reduces gradients, call "
    "hvd.unsynchronized(optimizer)."
)
BYPASSED = (
    "The optimizer {kind} updated {what} on rank {rank} while a DistributedOptimizer was still reducing their "
    "gradients: the {size} ranks train different models.\n"
    "HINT: call step() of the optimizer that hvd.DistributedOptimizer() returned, optimizer = "
    "hvd.DistributedOptimizer(optimizer, ...), not step() of the optimizer that was passed to it; or call "
    "synchronize() of the returned optimizer first."
)

# Steps before which enough was reduced: before a single step that may have been something else than gradients.
_SETTLING_STEPS = 2
# An optimizer's attribute: elements that were reduced before its last step, and how many steps had enough.
_REDUCED = "_hvdkit_reduced"


@functools.cache
def install() -> None:
    """Have PyTorch's optimizers warn where nobody reduces their gradients. Once a process."""
    torch_optimizer.register_optimizer_step_post_hook(_after_step)


@_disable_dynamo  # PyTorch has a graph end at each step anyway
def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if hasattr(optimizer, "_synchronizer") or WATCH.inside or is_settled(optimizer):
        return
    parameters = [parameter for parameter in parameters_of(optimizer.param_groups) if parameter.grad is not None]
    is_in_flight = in_flight(parameters[0]) if parameters else False
    if is_in_flight is False:
        return  # nothing was computed, or a DistributedOptimizer that is made of this one has reduced it
    if is_in_flight:
        _warn(optimizer, BYPASSED, parameters)
        return
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return  # DDP, FSDP, another library or the program may reduce them by torch.distributed
    before, steps = vars(optimizer).get(_REDUCED, (None, 0))
    now = OPERATIONS.reduced_elements
    if before is not None and 2 * (now - before) < sum(parameter.numel() for parameter in parameters):
        _warn(optimizer, ALONE, parameters)
        return
    steps += before is not None
    vars(optimizer)[_REDUCED] = now, steps
    if steps == _SETTLING_STEPS:
        settle(optimizer)


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
