"""Gradients of a step that failed or was given up: some of their elements may be sums already, others are not."""

from __future__ import annotations

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

# By gradient: its version when it was marked, or when a backward pass last added to it.
_MARKED: Any = WeakIdKeyDictionary()


def mark_half_summed(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    """No optimizer steps on this gradient of a parameter until it was cleared."""
    is_new = gradient not in _MARKED
    _MARKED[gradient] = gradient._version

    def look(hooked: torch.Tensor) -> None:
        if not _added_to(hooked.grad):
            handle.remove()

    if is_new:  # with a hook of its own: a job of one rank that goes on has no others
        handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(look)  # type: ignore[no-untyped-call]


def _added_to(gradient: torch.Tensor | None) -> bool:
    """A backward pass has added to a gradient; whether that is half summed still.

    Once cleared before, it has changed twice since it was marked.
    """
    if gradient is None or gradient not in _MARKED:
        return False
    if gradient._version >= _MARKED[gradient] + 2:
        del _MARKED[gradient]
        return False
    _MARKED[gradient] = gradient._version
    return True


def some_are_half_summed() -> bool:
    """Whether there is anything to look for."""
    return len(_MARKED) > 0


def is_half_summed(gradient: torch.Tensor | None) -> bool:
    """Whether a gradient is as a failed step left it, or that and more."""
    return gradient is not None and gradient in _MARKED and gradient._version == _MARKED[gradient]
