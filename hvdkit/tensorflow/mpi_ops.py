"""All of ``hvdkit.tensorflow``, under the name of Horovod's module."""

from __future__ import annotations

from hvdkit.tensorflow import *  # noqa: F403 (the same names)
from hvdkit.tensorflow import __all__ as _names

__all__ = [*_names]
