"""Calling an autograd function, whose ``apply`` PyTorch leaves untyped, from typed code."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad


class _NoGradient:
    """Takes the place of a function's context where nothing will be differentiated, and keeps nothing for it."""

    def save_for_backward(self, *tensors: Any) -> None: ...

    def mark_non_differentiable(self, *tensors: Any) -> None: ...


def apply(function: Any, *arguments: Any) -> Any:
    """``function.apply(*arguments)`` for a ``torch.autograd.Function``; quicker where no gradient is asked for."""
    tracked = torch.is_grad_enabled() and any(getattr(argument, "requires_grad", False) for argument in arguments)
    if tracked or forward_ad._current_level >= 0:  # inside forward-mode differentiation PyTorch says what is missing
        return function.apply(*arguments)
    return function.forward(_NoGradient(), *arguments)
