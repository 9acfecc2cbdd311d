"""What TensorFlow itself reads from the environment, and tells nobody."""

from __future__ import annotations

import os


def forced_memory_growth() -> bool | None:
    """Whether TensorFlow takes a GPU's memory bit by bit, whatever the program says; None if the program decides."""
    return {"true": True, "false": False}.get(os.environ.get("TF_FORCE_GPU_ALLOW_GROWTH", ""))
