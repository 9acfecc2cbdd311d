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

# Modules that reduce the gradients of their parameters: by the module that has the class.
_REDUCING = {
    "torch.nn.parallel.distributed": "DistributedDataParallel",
    "torch.distributed.fsdp.fully_sharded_data_parallel": "FullyShardedDataParallel",
}
# Steps in which enough was reduced: what a program reduces before the first one may be something else.
_LOOKS = 2

_HANDLES: list[RemovableHandle] = []  # of the hook, once it is there


class _Seen:
    """How many elements the program had reduced when an optimizer made its last step, and how many steps were seen.

    For one that has made none, what counts is what was reduced between the last steps of others: several may step one
    after the other on gradients that were reduced together.
    """

    def __init__(self) -> None:
        self._latest = self._before = 0  # at the last step of any, and at the last one before something was reduced
        self._by_optimizer: Any = WeakIdKeyDictionary()

    def stepped(self, now: int) -> None:
        """An optimizer makes a step."""
        if now != self._latest:
            self._before, self._latest = self._latest, now

    def enough(self, optimizer: torch.optim.Optimizer, now: int, elements: int) -> bool:
        """Whether about as much as the gradients was reduced since its last step."""
        before, looks = self._by_optimizer.get(optimizer, (self._before, 0))
        if 2 * (now - before) < elements:
            return False
        self._by_optimizer[optimizer] = now, looks + 1
        if looks + 1 >= _LOOKS:
            settle(optimizer)
        return True


_SEEN = _Seen()


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
    now = OPERATIONS.reduced_elements
    _SEEN.stepped(now)
    if hasattr(optimizer, "_synchronizer") or WATCH.inside or is_settled(optimizer):
        return
    computed = [one for one in parameters_of(optimizer.param_groups) if one.grad is not None]
    is_in_flight = in_flight(computed[0]) if computed else False
    if is_in_flight is False:
        return  # nothing was computed, or a DistributedOptimizer that is made of this one has reduced it
    parameters = list(filter(_is_plain, computed))
    if not is_in_flight:
        if _SEEN.enough(optimizer, now, sum(parameter.numel() for parameter in parameters)):
            return
        parameters = _not_in_modules(parameters)
    settle(optimizer)
    if parameters:
        _warn(optimizer, BYPASSED if is_in_flight else ALONE, parameters)


def _is_plain(parameter: torch.Tensor) -> bool:
    """Not one of which each rank has a part, as a DTensor."""
    return type(parameter.detach()) is torch.Tensor


def _not_in_modules(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Those that are in no model that one of PyTorch's own modules reduces. Looks at every object, once."""
    kinds = tuple(
        getattr(sys.modules[module], name)
        for module, name in _REDUCING.items()
        if hasattr(sys.modules.get(module), name)
    )
    covered: set[int] = set()
    for one in gc.get_objects() if kinds else ():
        if issubclass(type(one), kinds):
            covered.update(map(id, one.parameters()))
    return [parameter for parameter in parameters if id(parameter) not in covered]


def _warn(optimizer: torch.optim.Optimizer, text: str, parameters: Sequence[torch.Tensor]) -> None:
    topology = runtime.topology()
    what = _described(optimizer, parameters)
    filled = text.format(kind=type(optimizer).__name__, what=what, rank=topology.rank, size=topology.size)
    warnings.warn(filled, stacklevel=_users_level())


def _users_level() -> int:
    """Which frame above the one that called this is neither of hvdkit nor of PyTorch, as a stacklevel."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("hvdkit", "torch"):
        level, frame = level + 1, frame.f_back
    return level


def _described(optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> str:
    count = f"{len(parameters)} parameter{'s' if len(parameters) > 1 else ''}"
    names = {
        id(parameter): f"'{name}', "
        for group in optimizer.param_groups
        for parameter, name in zip(group["params"], group.get("param_names", ()), strict=False)
    }
    first = names.get(id(parameters[0]), "")
    return f"{count} (first: {first}of shape {tuple(parameters[0].shape)})"
