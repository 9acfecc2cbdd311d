"""Gradients of a step that failed or was given up: some of their elements may be sums already, others are not."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

HALF_SUMMED = (
    "The gradient of '{name}' is what a step that failed left, or that was given up: some of its elements may be "
    "summed over ranks already, others are not.\n"
    "HINT: call optimizer.zero_grad() and run the forward and backward pass again."
)
# At the end of the error that a step fails with.
STEP_FAILED = "The gradients of this step may be half summed: call optimizer.zero_grad() before you go on."

# Gradients that may be: until they are replaced, or all zeros when somebody looks.
_MARKED: Any = WeakIdKeyDictionary()


def mark_half_summed(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    """No optimizer steps on this gradient of a parameter until it was cleared, whatever is done to it or added."""
    is_new = gradient not in _MARKED
    _MARKED[gradient] = True
    marked = weakref.ref(parameter)

    def look(_: torch.Tensor) -> None:  # before a backward pass adds to what may have been cleared
        held = marked()
        if held is None or not is_half_summed(held.grad):
            handle.remove()

    if is_new:  # with a hook of its own: a job of one rank that goes on has no others
        handle: RemovableHandle = parameter.register_hook(look)  # type: ignore[no-untyped-call]


def some_are_half_summed() -> bool:
    """Whether there is anything to look for."""
    return len(_MARKED) > 0


def is_half_summed(gradient: torch.Tensor | None) -> bool:
    """Whether a gradient is what a failed step left, or was made of that, clipped for example."""
    if gradient is None or gradient not in _MARKED:
        return False
    if bool(gradient.any()):
        return True
    del _MARKED[gradient]
    return False
