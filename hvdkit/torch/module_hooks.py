"""Hooks on all modules."""

from __future__ import annotations

import warnings


def expect_hooks_on_all_modules() -> None:
    """Silence PyTorch's warning about hooks on all modules: hvdkit's hooks may be called an extra time."""
    warnings.filterwarnings("ignore", message=r"Using `torch\.compile\(module\)` when there are global hooks")
