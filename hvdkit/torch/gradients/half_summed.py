"""Gradients of a step that failed or was abandoned: some of their elements may be sums already, others are not."""

from __future__ import annotations

import weakref

import torch
from torch.utils.hooks import RemovableHandle

HALF_SUMMED = (
    "The gradient of '{name}' is what a step that failed left, or that was given up: some of its elements may be "
    "summed over ranks already, others are not.\n"
    "HINT: call optimizer.zero_grad() and run the forward and backward pass again."
)
# At the end of the error that a step fails with.
STEP_FAILED = "The gradients of this step may be half summed: call optimizer.zero_grad() before you go on."

# The attribute of a gradient that may be: until it is replaced, or all zeros when somebody looks. No table of weak
# references, since torch.utils.swap_tensors refuses a tensor that has such.
_ATTRIBUTE = "_hvdkit_half_summed"


class _Mark:
    """The mark that a gradient holds under ``_ATTRIBUTE``."""


# Empty if no gradient has to be looked at.
HALF_SUMMED_MARKS: weakref.WeakSet[_Mark] = weakref.WeakSet()


def mark_half_summed(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    """Let no optimizer step on this gradient of a parameter until it is cleared, whatever is done to it or added."""

    def look(_: torch.Tensor) -> None:  # before a backward pass adds to what may have been cleared
        if not is_half_summed(parameter.grad):
            handle.remove()

    if not hasattr(gradient, _ATTRIBUTE):
        mark = _Mark()
        setattr(gradient, _ATTRIBUTE, mark)
        HALF_SUMMED_MARKS.add(mark)
        # With a hook of its own: a job of one rank that goes on has no others.
        handle: RemovableHandle = parameter.register_hook(look)  # type: ignore[no-untyped-call]


def is_half_summed(gradient: torch.Tensor | None) -> bool:
    """True if a failed step left this gradient, or it was made of such a gradient, by clipping for example."""
    if gradient is None or not hasattr(gradient, _ATTRIBUTE):
        return False
    if bool(gradient.any()):
        return True
    delattr(gradient, _ATTRIBUTE)
    return False
