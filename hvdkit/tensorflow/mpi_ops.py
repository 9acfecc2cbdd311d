"""What scripts import from Horovod's module of this name: all of ``hvdkit.tensorflow``."""

from __future__ import annotations

from hvdkit.tensorflow import *  # noqa: F403 (the same names)
from hvdkit.tensorflow import __all__ as _names

__all__ = [*_names]
