"""Counting backward passes: hooks that say when a parameter's gradient is complete."""

from __future__ import annotations

import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from hvdkit.engine.life import runtime

TOO_MANY_PASSES = (
    "Gradients were computed more than backward_passes_per_step times before call to step(). "
    "Increase backward_passes_per_step to accumulate gradients locally.\n"
    "HINT: backward_passes_per_step is {passes} and '{name}' has had more. Call optimizer.step() or "
    "optimizer.synchronize() before the next backward(); where another model's loss also reaches these parameters, as "
    "in a GAN, turn their requires_grad off for that pass."
)
COMPUTED_AGAIN = (
    "The gradient of '{name}' was added to by a backward pass inside of the backward pass that had completed it, after "
    "it was handed over to be reduced.\n"
    "HINT: the model calls torch.utils.checkpoint with use_reentrant=True where it did not before; pass "
    "use_reentrant=False."
)
GRAPH_IN_GRADIENT = (
    "The gradient of '{name}' requires a gradient itself and cannot be reduced.\n"
    "HINT: use torch.autograd.grad(..., create_graph=True) for the inner gradient, and loss.backward() without it."
)

# PyTorch runs the backward() of an autograd.Function by this method.
_APPLY = BackwardCFunction.apply.__code__

# The hooks that a parameter has from us. A parameter's gradient can live in one optimizer's buffer only.
_OWNERS: Any = WeakIdKeyDictionary()


def in_flight(parameter: torch.Tensor) -> bool | None:
    """Whether the gradient of a parameter that is reduced by us was computed and not reduced yet; None for others'."""
    owner = _OWNERS.get(parameter)
    hooks = owner() if owner is not None else None
    return None if hooks is None else hooks.touched


def is_inside_backward() -> bool:
    """True if the calling hook runs in a backward pass that the backward() of a Python function started."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _APPLY:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


class ParameterHooks(ABC):
    """Hooks on parameters that may call ``complete(parameter)`` when a backward pass has computed its gradient.

    They hold no reference to this object: an optimizer that nobody keeps takes its hooks along.
    """

    superseded = False

    def __init__(self, complete: Callable[[torch.Tensor], None], name_of: Callable[[torch.Tensor], str]) -> None:
        self._complete = weakref.WeakMethod(complete)
        self._name_of = weakref.WeakMethod(name_of)
        self._handles: dict[int, tuple[weakref.ref[torch.Tensor], RemovableHandle]] = {}

    @abstractmethod
    def _computed(self, parameter: torch.Tensor) -> None:
        """A backward pass has added to a gradient."""

    def attach(self, parameter: torch.Tensor) -> bool:
        """Hook a parameter; once is enough, again changes nothing. Returns whether it had no hook of ours."""
        attached = self._handles.get(id(parameter))
        if attached is not None and attached[0]() is parameter:
            return False
        this = weakref.ref(self)

        def hook(hooked: torch.Tensor) -> None:
            hooks = this()
            if hooks is not None:
                hooks._computed(hooked)

        hook.__module__ = type(self).__module__  # which tells of what kind it is
        handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        self._handles[id(parameter)] = weakref.ref(parameter), handle
        return True

    def detach(self) -> None:
        """Take all hooks off again."""
        for _, handle in self._handles.values():
            handle.remove()
        self._handles.clear()

    def _name(self, parameter: torch.Tensor) -> str:
        name_of = self._name_of()
        return name_of(parameter) if name_of is not None else "a parameter"

    def __del__(self) -> None:
        self.detach()


class GradientHooks(ParameterHooks):
    """Hooks that count down ``passes`` backward passes and then call ``complete(parameter)``.

    A parameter that gets hooks here loses those of an earlier object, which from then on is ``superseded``.
    """

    def __init__(
        self, passes: int, complete: Callable[[torch.Tensor], None], name_of: Callable[[torch.Tensor], str]
    ) -> None:
        super().__init__(complete, name_of)
        self.passes = passes
        self._left: dict[int, int] = {}
        # Ids of parameters that backward passes inside of backward passes reach, as with reentrant checkpoints. How
        # often these add to a gradient is unknown before the outer pass ends.
        self.reentered: set[int] = set()
        self._graph_task, self._is_inside = -1, False

    @property
    def touched(self) -> bool:
        """True when a gradient was computed since the last ``reset()``; in a forked child nothing is counted."""
        return bool(self._left) and not runtime.is_forked()

    def reset(self) -> None:
        """A new step: every parameter has all its passes before it."""
        self._left.clear()

    def set_passes(self, passes: int) -> None:
        """Expect this many passes from now on; what was handed over in this step stays handed over."""
        self.passes = passes
        self._left = {key: passes if left > 0 else 0 for key, left in self._left.items()}

    def attach(self, parameter: torch.Tensor) -> bool:
        """Hook a parameter; one of a lazy module gets its hook when this is called after its first forward pass."""
        if is_lazy(parameter) or not super().attach(parameter):
            return False
        owner = _OWNERS.get(parameter)
        earlier = owner() if owner is not None else None
        if earlier is not None and earlier is not self:
            earlier.superseded = True
            earlier.detach()
        _OWNERS[parameter] = weakref.ref(self)
        return True

    def _computed(self, parameter: torch.Tensor) -> None:
        if runtime.is_forked() or not runtime.is_initialized():
            return  # a child's gradients are its own, and no rank's; after shutdown() all are
        task = torch._C._current_graph_task_id()
        if task != self._graph_task:
            self._graph_task, self._is_inside = task, is_inside_backward()
        if self._is_inside:
            self.reentered.add(id(parameter))
        left = self._left.get(id(parameter), self.passes) - 1
        if id(parameter) in self.reentered:
            left = 0
        elif left < 0:
            raise AssertionError(TOO_MANY_PASSES.format(passes=self.passes, name=self._name(parameter)))
        if parameter.grad is not None and parameter.grad.requires_grad:
            raise AssertionError(GRAPH_IN_GRADIENT.format(name=self._name(parameter)))
        self._left[id(parameter)] = left
        if left == 0:
            complete = self._complete()
            if complete is not None:
                complete(parameter)
