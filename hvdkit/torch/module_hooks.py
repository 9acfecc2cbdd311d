"""Hooks on all modules."""

from __future__ import annotations

import warnings


def expect_hooks_on_all_modules() -> None:
    """Keep PyTorch from warning of hooks on all modules: those are ours, and may well be called an extra time."""
    warnings.filterwarnings("ignore", message=r"Using `torch\.compile\(module\)` when there are global hooks")
