"""Hooks that hand gradients over during the backward pass of Keras's own train_step, and in no other."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from hvdkit.engine.session import runtime
from hvdkit.torch.gradients.hooks import ParameterHooks, is_of

COMPUTED_TWICE = (
    "The gradient of '{name}' was added to once more in a backward pass that had completed it before.\n"
    "HINT: backward passes inside of a backward pass do that: give torch.utils.checkpoint use_reentrant=False, or the "
    "model a train_step of its own, whose gradients are reduced when they are applied."
)


class TrainStepHooks(ParameterHooks):
    """Hooks on parameters that call ``complete(parameter)`` from ``begin()`` to ``end()``.

    The first backward pass is only looked at: one that completes a gradient twice, as passes inside of it do, is none
    to hand over from. Other optimizers may have hooks on the same parameters.
    """

    def __init__(self, complete: Callable[[torch.Tensor], None], name_of: Callable[[torch.Tensor], str]) -> None:
        super().__init__(complete, name_of)
        self._seen: dict[int, int] = {}  # by parameter, how often its gradient was complete since begin()
        self._looks = False
        self._hands_over = False
        self._is_known = False  # whether the last backward pass completed each gradient once
        self._is_ever_twice = False  # whether one that was to do so did not
        self.touched = False  # whether a gradient was handed over since reset()

    def attach(self, parameter: torch.Tensor) -> bool:
        """Hook a parameter; with a new one the next backward pass is only looked at."""
        is_new = super().attach(parameter)
        self._is_known = self._is_known and not is_new
        return is_new

    @property
    def hands_over(self) -> bool:
        """Whether gradients of this backward pass were handed over as they became complete."""
        return self._hands_over

    @property
    def seen(self) -> Container[int]:
        """See ParameterHooks."""
        return self._seen

    def reset(self) -> None:
        """A new step."""
        self.touched = False

    def begin(self) -> None:
        """Nothing but a backward pass comes before ``end()``."""
        self._seen.clear()
        self._looks = True
        self._hands_over = (
            self._is_known and not self._is_ever_twice and all(_is_last(handle) for handle, _ in self._handles.values())
        )

    def end(self) -> None:
        """It is over."""
        if self._looks and self._seen:
            self._is_known = all(times == 1 for times in self._seen.values())
        self.cancel()

    def cancel(self) -> None:
        """It was not completed, or is over already."""
        self._looks = self._hands_over = False

    def _computed(self, parameter: torch.Tensor) -> None:
        if not self._looks or runtime.is_forked():
            return
        times = self._seen[id(parameter)] = self._seen.get(id(parameter), 0) + 1
        if not self._hands_over:
            return
        if times > 1:
            self._is_ever_twice = True
            raise AssertionError(COMPUTED_TWICE.format(name=self._name(parameter)))
        complete = self._complete()
        if complete is not None and parameter.grad is not None and not parameter.grad.requires_grad:
            self.touched = True  # before: Ctrl-C may come in between
            complete(parameter)


def _is_last(handle: RemovableHandle) -> bool:
    """Whether no hook of the user's sees, or changes, a parameter's gradient after ours has handed it over."""
    hooks: Any = handle.hooks_dict_ref() or {}
    keys = list(hooks)
    later = keys[keys.index(handle.id) + 1 :] if handle.id in hooks else []
    return all(is_of(hooks[key], TrainStepHooks) for key in later)
