"""Calling an autograd function, whose ``apply`` PyTorch leaves untyped, from typed code."""

from __future__ import annotations

from typing import Any


def apply(function: Any, *arguments: Any) -> Any:
    """``function.apply(*arguments)`` for a ``torch.autograd.Function``."""
    return function.apply(*arguments)


def gradient_name(name: str | None) -> str | None:
    """The name under which the gradient of the operation ``name`` travels."""
    return None if name is None else f"{name}.gradient"
