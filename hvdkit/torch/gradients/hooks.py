"""Counting backward passes: hooks that are called when a parameter's gradient is complete."""

from __future__ import annotations

import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from types import FrameType
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from hvdkit.engine.session import runtime

TOO_MANY_PASSES = (
    "Gradients were computed more than backward_passes_per_step times before call to step(). "
    "Increase backward_passes_per_step to accumulate gradients locally.\n"
    "HINT: backward_passes_per_step is {passes} and '{name}' has had more. Call optimizer.step() or "
    "optimizer.synchronize() before the next backward(); where another model's loss also reaches these parameters, as "
    "in a GAN, turn their requires_grad off for that pass."
)
COMPUTED_AGAIN = (
    "The gradient of '{name}' was complete and handed over to be reduced, but then a nested backward pass (one inside "
    "of the backward pass) added to it.\n"
    "HINT: the model calls torch.utils.checkpoint with use_reentrant=True where it did not before; pass "
    "use_reentrant=False."
)
GRAPH_IN_GRADIENT = (
    "The gradient of '{name}' requires a gradient itself and cannot be reduced.\n"
    "HINT: use torch.autograd.grad(..., create_graph=True) for the inner gradient, and loss.backward() without it."
)

# PyTorch runs the backward() of an autograd.Function by this method.
_APPLY = BackwardCFunction.apply.__code__


class _Hook:
    """A hook on a parameter, which does not keep its ``hooks`` alive.

    Nothing refers weakly to a parameter: ``torch.utils.swap_tensors`` refuses a tensor that has weak references.
    """

    def __init__(self, hooks: ParameterHooks) -> None:
        self.hooks = weakref.ref(hooks)

    def __call__(self, parameter: torch.Tensor) -> None:
        if (hooks := self.hooks()) is not None:
            hooks._computed(parameter)


def hooks_on(parameter: torch.Tensor) -> dict[int, Any]:
    """Return the hooks that are called when a parameter's gradient is complete, by the ids of their handles."""
    return getattr(parameter, "_post_accumulate_grad_hooks", None) or {}


def is_of(hook: Any, kind: type[ParameterHooks]) -> bool:
    """True if a hook on a parameter belongs to hooks of this kind."""
    return isinstance(hook, _Hook) and isinstance(hook.hooks(), kind)


def _owner_of(parameter: torch.Tensor) -> GradientHooks | None:
    """Return the hooks of the one optimizer that reduces a parameter's gradient."""
    return next((hook.hooks() for hook in hooks_on(parameter).values() if is_of(hook, GradientHooks)), None)


def in_flight(parameter: torch.Tensor) -> bool | None:
    """True if a parameter's gradient was computed and not reduced yet; None if no distributed optimizer has it."""
    owner = _owner_of(parameter)
    return None if owner is None else owner.touched


def synchronizers_in_flight(parameters: Iterable[torch.Tensor]) -> list[Any]:
    """Return the owners of hooks, in the order of parameters, that have computed gradients and not reduced them."""
    owners = {id(hooks): hooks for parameter in parameters if (hooks := _owner_of(parameter)) is not None}
    return [owner for hooks in owners.values() if hooks.touched and (owner := hooks._owner()) is not None]


def is_inside_backward() -> bool:
    """True if the calling hook runs in a backward pass that the backward() of a Python function started."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _APPLY:
        frame = frame.f_back
    return frame is not None


class ParameterHooks(ABC):
    """Hooks on parameters that may call ``complete(parameter)`` when a backward pass has computed its gradient.

    They hold no reference to this object: an optimizer that nobody keeps takes its hooks along.
    """

    superseded = False

    def __init__(self, complete: Callable[[torch.Tensor], None]) -> None:
        # A bound method. Its object, which has a method ``name_of``, may go: the hooks do not keep it alive.
        method: Any = complete
        self._owner, self._complete = weakref.ref(method.__self__), method.__func__
        # By the parameter's id: the handle of its hook, and where PyTorch kept the parameter when it was hooked.
        self._handles: dict[int, tuple[RemovableHandle, int]] = {}
        # By the id of each parameter whose gradient was computed in this step: its backward passes, those that are
        # still to come in GradientHooks, those that are over in TrainStepHooks.
        self._passes: dict[int, int] = {}

    @abstractmethod
    def _computed(self, parameter: torch.Tensor) -> None:
        """Act on a backward pass that has added to a gradient."""

    def attach(self, parameter: torch.Tensor) -> bool:
        """Hook a parameter. Return False, and change nothing, if it has the hook already."""
        handle, place = self._handles.get(id(parameter), (None, 0))
        if handle is not None and handle.id in hooks_on(parameter):
            if place == parameter._cdata:
                return False
            # torch.utils.swap_tensors has put another tensor there, to which PyTorch does not take the hooks along.
            handle.remove()
            parameter._post_accumulate_grad_hooks = parameter._post_accumulate_grad_hooks
        handle = parameter.register_post_accumulate_grad_hook(_Hook(self))  # type: ignore[no-untyped-call]
        self._handles[id(parameter)] = handle, parameter._cdata
        return True

    def attach_all(self, parameters: Mapping[int, torch.Tensor]) -> None:
        """Hook parameters, given by id."""
        for parameter in parameters.values():
            self.attach(parameter)

    def attach_again(self, parameters: Mapping[int, torch.Tensor]) -> None:
        """Hook parameters whose hook was not called in this step: torch.utils.swap_tensors takes it off."""
        for key in parameters.keys() - self._passes.keys():
            self.attach(parameters[key])

    def detach(self) -> None:
        """Take all hooks off again."""
        for handle, _ in self._handles.values():
            handle.remove()
        self._handles.clear()

    def _name(self, parameter: torch.Tensor) -> str:
        owner: Any = self._owner()
        return "a parameter" if owner is None else str(owner.name_of(parameter))

    def __del__(self) -> None:
        self.detach()


class GradientHooks(ParameterHooks):
    """Hooks that count down ``passes`` before they call ``complete``; they take a parameter from earlier hooks."""

    def __init__(self, passes: int, complete: Callable[[torch.Tensor], None]) -> None:
        super().__init__(complete)
        self.passes = passes
        # Ids of parameters that backward passes inside of backward passes reach, as with reentrant checkpoints. How
        # often these add to a gradient is unknown before the outer pass ends.
        self.reentered: set[int] = set()
        self._graph_task, self._is_inside = -1, False
        # In this backward pass: the gradients of a forked child, or after shutdown(), are no rank's.
        self._counts = False

    @property
    def touched(self) -> bool:
        """True if a gradient was computed since the last ``reset()``; in a forked child nothing is counted."""
        return bool(self._passes) and not runtime.is_forked()

    @property
    def is_between_passes(self) -> bool:
        """True if some, and not all, of a step's backward passes have computed a gradient."""
        return any(left > 0 for left in self._passes.values())

    def reset(self) -> None:
        """Begin a new step, in which every parameter has all its passes before it."""
        self._passes.clear()

    def set_passes(self, passes: int) -> None:
        """Expect this many passes from now on; what was handed over in this step stays handed over."""
        self.passes = passes
        self._passes = {key: passes if left > 0 else 0 for key, left in self._passes.items()}

    def attach(self, parameter: torch.Tensor) -> bool:
        """Hook a parameter; one of a lazy module gets its hook when this is called after its first forward pass."""
        if is_lazy(parameter):
            return False
        earlier = _owner_of(parameter)
        if not super().attach(parameter):
            return False
        if earlier is not None and earlier is not self:
            earlier.superseded = True
            earlier.detach()
        return True

    def _computed(self, parameter: torch.Tensor) -> None:
        task, key = torch._C._current_graph_task_id(), id(parameter)
        if task != self._graph_task or task == -1:
            self._graph_task, self._is_inside = task, is_inside_backward()
            self._counts = runtime.current() is not None
        if not self._counts:
            return
        if self._is_inside:
            self.reentered.add(key)
        left = self._passes.get(key, self.passes) - 1
        if key in self.reentered:
            left = 0
        elif left < 0:
            raise AssertionError(TOO_MANY_PASSES.format(passes=self.passes, name=self._name(parameter)))
        gradient = parameter.grad
        if gradient is not None and gradient.requires_grad:
            raise AssertionError(GRAPH_IN_GRADIENT.format(name=self._name(parameter)))
        self._passes[key] = left
        if left == 0 and (owner := self._owner()) is not None:
            self._complete(owner, parameter)
