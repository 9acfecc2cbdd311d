"""No training without synchronisation in silence: what every optimizer of PyTorch is asked after its step.

An optimizer is asked until it is known to be as it should be, then never again. Gradients that the user's program
reduces by operations may travel as they are, or joined and copied back, so what tells of them is how much was reduced
since the optimizer's step before.
"""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch.optim import optimizer as torch_optimizer
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from hvdkit.api.gradients.guard import WATCH, is_settled, settle
from hvdkit.engine.life import runtime
from hvdkit.torch.gradients.hooks import in_flight
from hvdkit.torch.ops.framework import OPERATIONS
from hvdkit.torch.optimizers.names import parameters_of

ALONE = (
    "The optimizer {kind} updated {what} with gradients of rank {rank} alone: the {size} ranks train different "
    "models.\n"
    "HINT: wrap it, optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters()), and "
    "call step() of what that returns. A loop of your own may reduce gradients by hvd.allreduce, or the model may be "
    "in a DistributedDataParallel. Where ranks train apart on purpose, say so: hvd.unsynchronized(optimizer)."
)
BYPASSED = (
    "The optimizer {kind} updated {what} on rank {rank} while a DistributedOptimizer was still reducing their "
    "gradients: the {size} ranks train different models.\n"
    "HINT: call step() of what hvd.DistributedOptimizer() returned, optimizer = hvd.DistributedOptimizer(optimizer, "
    "...), not that of the optimizer which was given to it; or call synchronize() of that one before."
)

# Modules that reduce the gradients of their parameters: by the module that has the class.
_REDUCING = {
    "torch.nn.parallel.distributed": "DistributedDataParallel",
    "torch.distributed.fsdp.fully_sharded_data_parallel": "FullyShardedDataParallel",
}
# Steps in a row in which enough was reduced: what a program reduces before its first step may be something else.
_LOOKS = 2

_HANDLES: list[RemovableHandle] = []  # of the hook, once it is there
# By optimizer: how many elements had been reduced at its last step, and in how many steps enough was.
_SEEN: Any = WeakIdKeyDictionary()


def install() -> None:
    """Have PyTorch's optimizers warn where nobody reduces their gradients. Once a process."""
    if not _HANDLES:
        _HANDLES.append(torch_optimizer.register_optimizer_step_post_hook(_after_step))


def others_hooks() -> bool:
    """Whether somebody else asked to be called after the step of every optimizer."""
    ours = {handle.id for handle in _HANDLES}
    return any(key not in ours for key in torch_optimizer._global_optimizer_post_hooks)


@_disable_dynamo  # PyTorch has a graph end at each step anyway
def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if hasattr(optimizer, "_synchronizer") or WATCH.inside or is_settled(optimizer):
        return
    parameters = [one for one in parameters_of(optimizer.param_groups) if _is_plain(one) and one.grad is not None]
    if not parameters:
        return
    states = set(map(in_flight, parameters))
    text = BYPASSED if True in states else ALONE
    # One that has reduced them may be made of other optimizers.
    is_reduced = False in states or _reduced_by_operations(optimizer, parameters) or _reduced_by_modules(parameters)
    if text is ALONE and is_reduced:
        return
    settle(optimizer)
    topology = runtime.topology()
    what = _described(optimizer, parameters)
    filled = text.format(kind=type(optimizer).__name__, what=what, rank=topology.rank, size=topology.size)
    warnings.warn(filled, stacklevel=_users_level())


def _is_plain(parameter: torch.Tensor) -> bool:
    """Not one of which each rank has a part, as a DTensor."""
    return type(parameter.detach()) is torch.Tensor


def _reduced_by_operations(optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> bool:
    """Whether the user's program reduced about as much as these gradients since the optimizer's step before."""
    before, looks = _SEEN.get(optimizer, (0, 0))
    now = OPERATIONS.reduced_elements
    if 2 * (now - before) < sum(parameter.numel() for parameter in parameters):
        return False
    _SEEN[optimizer] = now, looks + 1
    if looks + 1 >= _LOOKS:
        settle(optimizer)
    return True


def _reduced_by_modules(parameters: Sequence[torch.Tensor]) -> bool:
    """Whether these are parameters of models that are wrapped in one of PyTorch's own. Looks at every object."""
    kinds = tuple(
        getattr(sys.modules[module], name)
        for module, name in _REDUCING.items()
        if hasattr(sys.modules.get(module), name)
    )
    left = {id(parameter) for parameter in parameters}
    for one in gc.get_objects():
        if issubclass(type(one), kinds):
            left.difference_update(map(id, one.parameters()))
    return len(left) < len(parameters)


def _users_level() -> int:
    """Which frame above the one that called this is neither of hvdkit nor of PyTorch, as a stacklevel."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("hvdkit", "torch"):
        level, frame = level + 1, frame.f_back
    return level


def _described(optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> str:
    count = f"{len(parameters)} parameter{'s' if len(parameters) > 1 else ''}"
    names = [name for group in optimizer.param_groups for name in group.get("param_names", ())]
    first = f"'{names[0]}', " if names else ""
    return f"{count} (first: {first}of shape {tuple(parameters[0].shape)})"
