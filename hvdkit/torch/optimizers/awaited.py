"""Parameters that wait for an update: of a class of which PyTorch asks before it does anything with them.

Whatever of PyTorch's is called with one, on whatever thread, goes through ``__torch_function__``, where the update is
made first. What PyTorch hands to C++ without that is guarded by itself: ``torch.func``, functions of autograd, modules
with extensions of their own, scripted and compiled ones. An extension that is given a parameter in no other way than a
plain call, outside of the module whose parameter it is, cannot be seen.
"""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch._functorch.eager_transforms
import torch._functorch.vmap
import torch.utils.dlpack
from torch._compile import _disable_dynamo
from torch.utils.hooks import RemovableHandle

from hvdkit.torch.module_hooks import expect_hooks_on_all_modules


class Completes(Protocol):
    """Who makes the update of a parameter."""

    def complete(self, parameter: torch.Tensor) -> None:
        """Make it."""

    def complete_all(self) -> None:
        """Make all that are left."""


# What can be answered at once: no value is read.
NO_VALUES = frozenset(
    getattr(torch.Tensor, name).__get__ for name in ("device", "dtype", "is_leaf", "layout", "requires_grad", "shape")
)


@dataclass(frozen=True)
class _Wait:
    """A parameter that waits for its update, and what makes that."""

    parameter: Any  # kept: nothing refers weakly to it, since torch.utils.swap_tensors refuses that
    updates: Completes
    hook: RemovableHandle  # of a graph made before the step, whose backward pass is run after it


_UNDER_WAY: dict[int, _Wait] = {}  # by the parameter's id


# In evaluation they take another way where a parameter within them is of a class of its own.
_ASKS_FOR_SUBCLASSES = (torch.nn.MultiheadAttention, torch.nn.TransformerEncoderLayer, torch.nn.TransformerEncoder)


class UpdatedLater(torch.nn.Parameter):
    """A parameter whose update is under way: it is made before PyTorch does anything with it."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in NO_VALUES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        complete(_waiting_in((args, kwargs)))
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        complete([self])
        return copy.deepcopy(self, memo)  # of the class that it has by now


def _waiting_in(value: Any) -> Iterator[UpdatedLater]:
    if type(value) is UpdatedLater:
        yield value
    elif isinstance(value, (list, tuple)):
        for member in value:
            yield from _waiting_in(member)
    elif isinstance(value, dict):
        for member in value.values():
            yield from _waiting_in(member)


@_disable_dynamo
def complete(parameters: Iterable[torch.Tensor]) -> None:
    """Make the updates that these parameters wait for."""
    for parameter in parameters:
        wait = _UNDER_WAY.get(id(parameter))
        if wait is not None:
            wait.updates.complete(parameter)
        elif type(parameter) is UpdatedLater:
            _become_plain(parameter)  # it was made while another one waited


def _become_plain(parameter: Any) -> None:
    parameter.__class__ = torch.nn.Parameter


def wait_for(parameter: Any, updates: Completes) -> None:
    """From now on an update of ``parameter`` is made by ``updates`` before anybody uses it."""
    _guard_what_asks_nobody()

    def before_gradient(_: torch.Tensor) -> None:
        updates.complete(parameter)

    _UNDER_WAY[id(parameter)] = _Wait(parameter, updates, parameter.register_hook(before_gradient))
    parameter.__class__ = UpdatedLater


def is_waiting(parameter: torch.Tensor) -> bool:
    """Whether its update is still to be made."""
    return id(parameter) in _UNDER_WAY


def release(parameter: torch.Tensor) -> None:
    """Its update is made: it is an ordinary parameter."""
    wait = _UNDER_WAY.pop(id(parameter), None)
    _become_plain(parameter)
    if wait is not None:
        wait.hook.remove()


def complete_everything() -> None:
    """Make all updates that are left in this process."""
    for updates in {wait.updates for wait in _UNDER_WAY.values()}:
        updates.complete_all()


def before_forward(module: torch.nn.Module, _: Any) -> None:
    """Before a module computes: its extension in C++ may be given parameters without a word of PyTorch's.

    So is what was scripted or compiled, as a whole.
    """
    if torch.compiler.is_compiling():
        return
    if isinstance(module, torch.jit.ScriptModule) or type(module).__name__ == "OptimizedModule":
        complete_everything()
    elif isinstance(module, _ASKS_FOR_SUBCLASSES) and not module.training:
        complete(_waiting_in(list(module.parameters())))
    else:
        complete(_waiting_in(list(module._parameters.values())))


@functools.cache
def _guard_what_asks_nobody() -> None:
    """From now on what hands tensors to C++ by itself completes them: torch.func, functions of autograd, DLPack."""
    expect_hooks_on_all_modules()
    for owner, name in (
        (torch._functorch.eager_transforms, "_wrap_for_grad"),
        (torch._functorch.vmap, "_add_batch_dim"),
        (torch.utils.dlpack, "to_dlpack"),
    ):
        setattr(owner, name, _completing(getattr(owner, name)))
    recursive: Any = torch.jit._recursive
    recursive.create_script_module = _completing_all(recursive.create_script_module)
    function: Any = torch.autograd.Function
    function.apply = classmethod(_completing(function.apply.__func__))
    # A child has no ranks to wait for.
    os.register_at_fork(before=complete_everything)


def _completing_all(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        complete_everything()
        return plain(*args, **kwargs)

    return guarded


def _completing(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        if _UNDER_WAY:
            complete(_waiting_in((args, kwargs)))
        return plain(*args, **kwargs)

    return guarded
